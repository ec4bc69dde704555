"""A process may die between any two steps: what was flushed is back, what comes back is right."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import FaultIo, payload_of

BLOCK_BYTES = 5_000

WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.testing import payload_of

    store, first_seed = sys.argv[1], int(sys.argv[2])
    layout = kvtier.LayoutSpec(
        128,
        {"block": kvtier.parts(("index", 1000), ("main", 4000)),
         "state": kvtier.parts(("swa", 9001))},
    )
    cache = kvtier.open(store, segment_bytes=1 << 18, commit_delay_s=0.001)
    ns = cache.namespace(layout, model="model", salt="tenant")
    for seed in range(first_seed, first_seed + 10_000):
        tokens = np.random.default_rng(seed).integers(0, 1 << 20, 6 * 128 + 5)
        digests = ns.match(tokens, want=("block",)).digests
        blocks = [payload_of(d, 5000) for d in digests]
        ticket = ns.put(digests, blocks, durability="flushed")
        state = ns.put_state(
            digests[-1], payload_of(digests[-1] + b"s", 9001), n_blocks=6, durability="flushed"
        )
        if ticket.wait(60) and state.wait(60):
            print(seed, flush=True)
    """
)


def start_writer(store, first_seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(store), str(first_seed)],
        stdout=subprocess.PIPE,
        text=True,
    )


def kill(process: subprocess.Popen[str]) -> list[int]:
    """kill -9; returns every seed the process had promised until then."""
    os.kill(process.pid, signal.SIGKILL)
    assert process.stdout is not None
    rest = process.stdout.read()
    process.wait()
    process.stdout.close()
    return [int(line) for line in rest.split("\n")[:-1]]


def promised(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


def assert_all_there(model, seeds) -> None:
    for seed in seeds:
        tokens = model.prompt(seed, 6)
        match = model.ns.match(tokens)
        assert match.n_blocks == 6, f"chain {seed} was flushed and is not back"
        dst = np.zeros((6, BLOCK_BYTES), np.uint8)
        state = np.zeros(9_001, np.uint8)
        result = model.ns.load(match, dst=dst, state_dst=state, wait=True).wait()
        assert result.ok
        assert model.check(match, result, dst) == 6
        assert np.array_equal(state, payload_of(match.digests[-1] + b"s", 9_001))
        match.release()


@pytest.mark.slow
def test_everything_flushed_is_back_after_kill_9_again_and_again(store, make_model):
    kvtier.open(store).close()
    chooser = random.Random(5)
    seeds: list[int] = []
    for round_ in range(3):
        writers = [start_writer(store, round_ * 100_000 + lane * 50_000) for lane in range(2)]
        for writer in writers:
            seeds += promised(writer, chooser.randrange(1, 25))
        for writer in writers:
            seeds += kill(writer)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert_all_there(model, seeds)
        report = cache.gc()
        assert report is not None
        assert report.adopted_writers == 6
        assert_all_there(model, seeds)
    with kvtier.open(store) as cache:
        assert_all_there(make_model(cache), seeds)


def test_a_survivor_sees_what_a_killed_neighbour_flushed(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        writer = start_writer(store, 7_000)
        seeds = promised(writer, 5)
        assert_all_there(model, seeds)
        seeds += kill(writer)
        assert_all_there(model, seeds)


def crash_run(store, make_model, seed: int, step: int) -> tuple[list[int], int]:
    """Write chains until the process dies at `step`; returns the chains that were flushed."""
    io = FaultIo(seed, crash_at=step)
    flushed: list[int] = []
    cache = kvtier.open(
        store,
        io=io,
        segment_bytes=1 << 16,
        commit_delay_s=0,
        sync_bytes=60_000,
        quota_bytes=1 << 22,
    )
    model = make_model(cache)
    for chain in range(5):
        if model.store(model.prompt(chain, 4), durability="flushed").wait(0 if io.dead else 10):
            flushed.append(chain)
        if io.dead:
            break
    steps = io.steps
    io.crash()
    cache.close(timeout=0)
    return flushed, steps


@pytest.mark.parametrize("seed", [1, 2])
def test_dying_at_any_step_loses_nothing_flushed_and_returns_nothing_wrong(
    tmp_path, make_model, make_store, seed
):
    _, steps = crash_run(make_store(tmp_path / "all"), make_model, seed, step=10_000)
    assert steps > 20
    for step in range(1, steps + 1, 4 if seed == 1 else 5):
        store = make_store(tmp_path / f"{step}")
        flushed, _ = crash_run(store, make_model, seed, step)
        with kvtier.open(store) as cache:
            model = make_model(cache)
            for _ in range(2):
                for chain in range(5):
                    matched, good = model.load_all(model.prompt(chain, 4))
                    assert good == matched, "the index names a record that is not whole"
                    assert matched == 4 or chain not in flushed
                cache.gc()


def test_records_written_but_not_indexed_are_adopted_by_scan(store, make_model):
    """The log of a dead writer lost its last frames; its segments still say what they hold."""
    writer = start_writer(store, 40)
    seeds = promised(writer, 6) + kill(writer)
    (folder,) = (store / "w").iterdir()
    log = folder / "idx-0.kvx"
    os.truncate(log, 4096)
    with kvtier.open(store) as cache:
        assert sum(make_model(cache).block_hits(make_model(cache).prompt(s, 6)) for s in seeds) < 36
        cache.gc()
        assert_all_there(make_model(cache), seeds)


def test_a_half_written_last_frame_is_overwritten_by_adoption(store, make_model):
    writer = start_writer(store, 60)
    seeds = promised(writer, 3) + kill(writer)
    (folder,) = (store / "w").iterdir()
    log = folder / "idx-0.kvx"
    os.truncate(log, log.stat().st_size - 1_000)
    with kvtier.open(store) as cache:
        cache.gc()
        assert_all_there(make_model(cache), seeds)
    with kvtier.open(store) as cache:
        assert_all_there(make_model(cache), seeds)


@pytest.mark.slow
def test_what_is_five_seconds_old_survives_kill_9_without_being_asked_to(store, make_model):
    """No flush, no durability: the default puts of a process that is killed."""
    writer = subprocess.Popen(
        [sys.executable, "-c", BEHIND_WRITER, str(store)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    put: list[tuple[float, int]] = []
    for line in writer.stdout:
        at, seed = line.split()
        put.append((float(at), int(seed)))
        if put[-1][0] - put[0][0] >= 7:
            break
    kill(writer)
    old = [seed for at, seed in put if put[-1][0] - at >= 5]
    assert len(old) >= 10
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        cache.gc()
        back = 0
        for seed in old:
            matched, good = model.load_all(model.prompt(seed, 6))
            assert matched == good
            back += good
        assert back >= 0.99 * 6 * len(old)


BEHIND_WRITER = textwrap.dedent(
    """
    import sys, time
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.testing import payload_of

    layout = kvtier.LayoutSpec(
        128,
        {"block": kvtier.parts(("index", 1000), ("main", 4000)),
         "state": kvtier.parts(("swa", 9001))},
    )
    cache = kvtier.open(sys.argv[1])
    ns = cache.namespace(layout, model="model", salt="tenant")
    pause = __import__("threading").Event()
    for seed in range(100_000):
        tokens = np.random.default_rng(seed).integers(0, 1 << 20, 6 * 128 + 5)
        digests = ns.match(tokens, want=("block",)).digests
        ns.put(digests, [payload_of(d, 5000) for d in digests])
        print(time.monotonic(), seed, flush=True)
        pause.wait(0.05)
    """
)


def test_a_stopped_process_that_holds_the_directory_stops_nobody_else(store, make_model):
    """SIGSTOP: it keeps its locks and open files, and comes back to a directory that moved on."""
    writer = start_writer(store, 0)
    seeds = promised(writer, 3)
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        with kvtier.open(store, floor_s=0) as cache:
            model = make_model(cache)
            assert_all_there(model, seeds)
            mine = model.prompt(50_000, 6)
            assert model.store(mine, durability="flushed").wait(60)
            assert cache.gc().adopted_writers == 0, "it is alive, its folder is its own"
            assert model.load_all(mine) == (6, 6)
    finally:
        os.kill(writer.pid, signal.SIGCONT)
    seeds += promised(writer, 3)
    seeds += kill(writer)
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert_all_there(model, seeds)
        assert model.load_all(mine) == (6, 6)
        assert cache.gc().adopted_writers == 1
        assert_all_there(model, seeds)
