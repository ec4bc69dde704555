"""The Mooncake tier on a real `mooncake_master` on loopback: `nox -s mooncake`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

import deepinfer_kvtier as kvtier

SECRET = bytes(32)


@pytest.fixture
def master():
    program = shutil.which("mooncake_master")
    if program is None:
        pytest.skip("no mooncake_master: pip install mooncake-transfer-engine-non-cuda")
    try:
        import mooncake.store  # noqa: F401
    except ImportError as cause:
        pytest.skip(f"the Mooncake client does not load: {cause}")
    with socket.socket() as one, socket.socket() as two:
        for probe in (one, two):
            probe.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], two.getsockname()[1]
    running = []

    class Master:
        url = f"mooncake://127.0.0.1:{port}?segment_bytes={64 << 20}"

        def start(self) -> None:
            running.append(
                subprocess.Popen(
                    [
                        program,
                        "--rpc_address=127.0.0.1",
                        f"--rpc_port={port}",
                        f"--metrics_port={metrics}",
                        "--enable_metric_reporting=false",
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            wait_for(lambda: listens(port))

        def kill(self) -> None:
            running[-1].kill()
            running[-1].wait()

    master = Master()
    master.start()
    yield master
    for process in running:
        process.kill()
        process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(check, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_a_pool_serves_another_cache_and_survives_the_death_of_its_master(
    master, tmp_path, make_model
):
    with (
        kvtier.open(tmp_path / "one", secret=SECRET, tiers=[master.url]) as one,
        kvtier.open(host_bytes=0, secret=SECRET, tiers=[f"{master.url}&name=pool"]) as two,
    ):
        model, reader = make_model(one), make_model(two)
        tokens = model.prompt(1, 20)
        model.store(tokens)
        assert one.flush().done
        assert reader.load_all(tokens) == (20, 20)

        master.kill()
        matched, right = reader.load_all(tokens)
        assert right == matched == 0, "a dead master is a miss"
        assert model.load_all(tokens) == (20, 20), "and takes nothing from the other tiers"

        master.start()

        def works_again() -> bool:
            fresh = model.prompt(int(time.monotonic() * 1000) % 100_000, 3)
            model.store(fresh)
            one.flush()
            return reader.load_all(fresh) == (3, 3)

        wait_for(works_again, 60.0)
        matched, right = reader.load_all(tokens)
        assert right == matched, "what is found is right; what is lost is a miss"


def test_a_pool_gives_compressed_records_of_differing_lengths_back(master):
    """Its client is handed room for the expanded record and says how much it has filled."""
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("flat", 20_000), ("noise", 9_000))})
    tokens = list(range(6 * 128))
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (6, 29_000), dtype=np.uint8)
    for i in range(6):
        source[i, : 2_000 * (i + 4)] = i  # the second part, too, of the last ones
    with (
        kvtier.open(host_bytes=0, secret=SECRET, tiers=[master.url], compression="zstd-1") as one,
        kvtier.open(host_bytes=0, secret=SECRET, tiers=[f"{master.url}&name=pool"]) as two,
    ):
        ns = one.namespace(layout, model="m", salt="t")
        ns.put(ns.match(tokens).digests, source)
        assert one.flush().done
        assert one.stats()["compression"]["records"] == 6
        reader = two.namespace(layout, model="m", salt="t")
        with reader.match(tokens, leave_last=False) as match:
            room = np.zeros_like(source)
            assert reader.load(match, dst=room, wait=True).wait().ok
        assert np.array_equal(room, source)
        assert two.stats()["tiers"]["pool"]["expanded_records"] == 6
