"""Every store that `deepinfer serve` can be told to keep blocks in: it is restarted, and hits.

S3 is moto, a mock. Mooncake is a real master on loopback, Redis a real server. `nox -s cache_tiers`
has what they need; each test says aloud what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

BLOCK = 128
WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def program(port: int | None, *argv: str, ready: str = "", **env: str) -> Iterator[None]:
    """A server in the background until it listens on `port`, or prints `ready`; killed at the
    end."""
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if ready else subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    )
    try:
        if ready:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == ready
        end = time.monotonic() + WAIT_S
        while port is not None and not listens(port):
            assert process.poll() is None, f"{argv[0]} ended"
            assert time.monotonic() < end, f"{argv[0]} does not listen"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("5b" * 32 + "\n")
    return path


def long_prompt(system_prompt: str) -> list[dict]:
    """More than two replays of the embedded model, so that one pays."""
    return [
        {"role": "system", "content": "\n".join(f"{i}. {system_prompt}" for i in range(7))},
        {"role": "user", "content": "Tell me a story about a fox."},
    ]


def ask(server, messages):
    body = {"model": "deepinfer-demo", "temperature": 0, "max_tokens": 8, "messages": messages}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    usage = found["usage"]
    details = usage["prompt_tokens_details"]
    return found["choices"][0]["message"], usage["prompt_tokens"], details


def restart_and_hit(start, until, system_prompt, tier, *argv, **options):
    """Serve, ask, end, serve again, ask again: the answer is the same, its blocks from `tier`.

    Returns what the second answer tells of its cached tokens.
    """
    messages = long_prompt(system_prompt)
    told = []
    for turn in range(2):
        server = start("--single-process", *argv, **options).wait_ready()
        told.append(ask(server, messages))
        if turn:
            name = f"deepinfer_worker_prefix_hit_tokens_{tier}_total"
            until(lambda server=server, name=name: server.metric(name) > 0)
        server.terminate()
    (first, prompt, before), (second, _, after) = told
    assert before["cached_tokens"] == 0
    assert after["cached_tokens"] == (prompt - 1) // BLOCK * BLOCK
    assert second == first
    return after


def test_a_local_folder(start, until, system_prompt, tmp_path):
    """The default: the last window of a prompt is there, too."""
    found = restart_and_hit(start, until, system_prompt, "disk", cache_dir=tmp_path / "kv")
    assert (found["window"], found["replayed_tokens"]) == ("stored", 0)


def test_a_shared_folder(start, until, system_prompt, tmp_path):
    """Blocks alone: the window is rebuilt exactly, and the text is what it was."""
    argv = ("--cache-shared", "--dtype", "float64")
    found = restart_and_hit(start, until, system_prompt, "disk", *argv, cache_dir=tmp_path / "kv")
    assert found["window"] == "exact_replay"
    assert 0 < found["replayed_tokens"] < found["cached_tokens"]


@pytest.mark.slow
def test_object_storage_against_a_mock_of_s3(start, until, system_prompt, tmp_path, secret):
    for module in ("moto", "obstore"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module}: nox -s cache_tiers installs it")
    port = free_port()
    keys = {"AWS_ACCESS_KEY_ID": "mock", "AWS_SECRET_ACCESS_KEY": "mock"}
    with program(port, sys.executable, "-m", "moto.server", "-p", str(port), "-H", "127.0.0.1"):
        assert httpx.put(f"http://127.0.0.1:{port}/cache").status_code == 200
        url = f"s3://cache/kv?endpoint=http://127.0.0.1:{port}&allow_http=true&poll_s=1"
        argv = ("--no-cache-local", "--cache-secret-file", str(secret), "--cache-tier", url)
        found = restart_and_hit(
            start, until, system_prompt, "s3", *argv, cache_dir=tmp_path / "kv", env=keys
        )
    assert found["window"] == "exact_replay"


LENDER = """
import sys
import deepinfer_kvtier as kvtier
with kvtier.open(host_bytes=0, secret=bytes(32), tiers=[sys.argv[1]]):
    print("lends", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_pool_of_memory_behind_a_mooncake_master(start, until, system_prompt, tmp_path, secret):
    """Another process lends the memory: that of a server goes with it."""
    master = shutil.which("mooncake_master") or str(
        Path(sys.executable).with_name("mooncake_master")
    )
    if not Path(master).exists():
        pytest.skip("no mooncake_master: nox -s cache_tiers installs it")
    port, metrics = free_port(), free_port()
    flags = ("--rpc_address=127.0.0.1", f"--rpc_port={port}", f"--metrics_port={metrics}")
    pool = f"mooncake://127.0.0.1:{port}"
    lend = (sys.executable, "-c", LENDER, f"{pool}?segment_bytes={64 << 20}")
    with program(port, master, *flags), program(None, *lend, ready="lends"):
        url = f"{pool}?segment_bytes=0"
        argv = ("--no-cache-local", "--cache-secret-file", str(secret), "--cache-tier", url)
        found = restart_and_hit(
            start, until, system_prompt, "mooncake", *argv, cache_dir=tmp_path / "kv"
        )
    assert found["window"] == "exact_replay"


@pytest.mark.slow
def test_a_location_service_on_redis(start, until, system_prompt, tmp_path, secret):
    """Where in the shared folder a block lies is asked of a real server, not read from logs."""
    if importlib.util.find_spec("redis") is None:
        pytest.skip("no redis client: nox -s cache_tiers installs it")
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.skip("no redis-server: apt install redis-server")
    port = free_port()
    flags = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
    with program(port, server, *flags):
        url = f"redis://127.0.0.1:{port}/0"
        argv = ("--cache-secret-file", str(secret), "--cache-location", url)
        found = restart_and_hit(
            start, until, system_prompt, "located", *argv, cache_dir=tmp_path / "kv"
        )
    assert found["window"] == "exact_replay"


@pytest.mark.slow
def test_a_window_directory_on_redis(start, until, system_prompt, tmp_path):
    """Several workers, and none of them keeps the directory."""
    if importlib.util.find_spec("redis") is None:
        pytest.skip("no redis client: nox -s cache_tiers installs it")
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None:
        pytest.skip("no redis-server: apt install redis-server")
    port = free_port()
    flags = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path))
    with program(port, server, *flags):
        argv = ("--window-directory", f"redis://127.0.0.1:{port}/0", "--persist-state", "none")
        served = start("--prefill-workers", "2", *argv, cache_dir=tmp_path / "kv").wait_ready()
        messages = long_prompt(system_prompt)
        first, _, _ = ask(served, messages)

        def pulled():
            again, _, details = ask(served, messages)
            assert again == first
            return details["window"] in ("peer", "local")

        until(pulled)
