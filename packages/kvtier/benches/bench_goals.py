"""The goals of the cache, each beside its ceiling or a peer in one run.

    python packages/kvtier/benches/bench_goals.py [--only G1,G3] [--blocks 256] [--rounds 5]

Every goal is measured in alternating rounds with what it is compared to; medians. On a machine that
does other work only the ratios mean something, and of those the one of processor time ("cpu") more
than the one of wall time. Peers take part when they are installed, each of them in its own right:

    pip install lmcache==0.5.6                      # brings a CUDA build of torch, about 6 GB
    pip install mooncake-transfer-engine-non-cuda   # needs libibverbs1

G12, G15 and G16 are tests (`pytest packages/kvtier/tests`, `nox -s mount`); G17 is how long
they take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import peers
from goal_common import (
    BATCH,
    BLOCK_BYTES,
    LAYOUT,
    Rounds,
    percentile,
    row,
    source_of,
    tokens_of,
)
from goal_disk import g5_g6_g7, g8_g9

import deepinfer_kvtier as kvtier

HERE = Path(__file__).parent


def g1_g2(rounds: int, blocks: int) -> None:
    del blocks
    cache = kvtier.open(host_bytes=1 << 20)
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 64))})
    ns = cache.namespace(layout, model="bench")
    tokens = tokens_of(600)
    digests = ns.match(tokens).digests
    ns.put(digests, np.zeros((600, 64), np.uint8))

    def match() -> None:
        with ns.match(tokens) as found:
            assert found.n_blocks == 600

    times: list[float] = []
    for _ in range(40 * rounds):
        started = time.perf_counter()
        match()
        times.append(time.perf_counter() - started)
    figure = f"p50 {statistics.median(times) * 1e3:.2f}, p99 {percentile(times, 0.99) * 1e3:.2f} ms"
    row(
        "G1", "match of 600 blocks in memory: hash, probe, lease", figure, "p50 <= 1.5, p99 <= 4 ms"
    )
    with peers.lmcache() as peer:
        if peer is None:
            row("G1", "against LMCache process_tokens + batched_contains", peers.why(), "<= 0.33")
        else:
            lookup = peer.lookup(tokens)
            both = Rounds(4 * rounds, {"peer": lookup, "ours": match})
            share = both.wall("ours") / both.wall("peer")
            figure = f"{share:.2f} ({both.wall('peer') * 1e3:.1f} ms there)"
            row("G1", "against LMCache process_tokens + batched_contains", figure, "<= 0.33")
    grown = ns.hasher()
    grown.extend(tokens)
    hashing = Rounds(
        4 * rounds,
        {
            "whole": lambda: ns.hasher().extend(tokens),
            "one": lambda: [grown.extend(tokens[:128]) for _ in range(100)],
        },
    )
    row(
        "G2",
        "chain hash; one more block",
        f"{len(tokens) / hashing.cpu('whole') / 1e6:.0f} Mtok/s; {hashing.cpu('one') * 1e4:.1f} us",
        ">= 60 Mtok/s; <= 10 us",
    )
    cache.close()


def g3_g4(rounds: int, blocks: int) -> None:
    cache = kvtier.open(host_bytes=(blocks + 1) * BLOCK_BYTES)
    ns = cache.namespace(LAYOUT, model="bench")
    tokens, source = tokens_of(blocks), source_of(blocks)
    target, spare = np.empty_like(source), np.empty_like(source)
    digests = ns.match(tokens).digests
    ns.put(digests, source)
    match = ns.match(tokens)

    def copy_loop() -> None:
        for i in range(blocks):
            spare[i] = source[i]

    def get() -> None:
        for start in range(0, blocks, BATCH):
            chunk = slice(start, min(blocks, start + BATCH))
            assert ns.load(match, blocks=chunk, dst=target[chunk], wait=True).wait().ok

    both = Rounds(3 * rounds, {"memcpy": copy_loop, "ours": get})
    assert np.array_equal(target, source)
    row(
        "G3",
        "memory to caller, 64 blocks a call, of a copy loop",
        both.ratio("memcpy", "ours"),
        ">= 0.90",
    )
    for name, peer_of, goal in (
        ("LMCache host get", peers.lmcache, ">= 2"),
        ("Mooncake get_into (several threads)", peers.mooncake, ">= 1"),
    ):
        with peer_of() as peer:
            if peer is None:
                row("G3", f"times {name}", peers.why(), goal)
                continue
            read = peer.filled(source)
            pair = Rounds(2 * rounds, {"peer": read, "ours": get})
            row("G3", f"times {name}", pair.ratio("peer", "ours"), goal)
    views = Rounds(4 * rounds, {"ours": match.views})
    row("G4", "view of a block in place", f"{views.cpu('ours') / blocks * 1e6:.2f} us", "<= 3 us")
    match.release()
    cache.close()


def g10(rounds: int, blocks: int) -> None:
    del rounds, blocks
    row("G10", "wrong bytes in a million reads under faults", "nox -s kvtier-faults", "0")


def g11(rounds: int, blocks: int) -> None:
    del blocks
    tokens, source = tokens_of(BATCH), source_of(BATCH)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"host_bytes": 64 << 20, "queue_bytes": 64 << 20}
        cache = kvtier.open(folder, **settings)
        ns = cache.namespace(LAYOUT, model="bench")
        digests = ns.match(tokens).digests
        times: list[float] = []
        cpu: list[float] = []
        for number in range(40 * rounds + 1):
            fresh = [number.to_bytes(4, "big") + digest[4:] for digest in digests]
            started, spent = time.perf_counter(), time.thread_time()
            ticket = ns.put(fresh, source, parents=fresh[0], copy=False)
            cpu.append(time.thread_time() - spent)
            times.append(time.perf_counter() - started)
            ticket.wait()
        cache.close()
    del times[0], cpu[0]  # memory and files are new to it
    figure = (
        f"p50 {statistics.median(times) * 1e3:.2f}, p99 {percentile(times, 0.99) * 1e3:.2f} ms;"
        f" of the caller's processor p50 {statistics.median(cpu) * 1e3:.2f} ms"
    )
    row("G11", "put of 64 blocks with copy=False", figure, "p99 <= 1 ms")


def g12(rounds: int, blocks: int) -> None:
    """One reader, then fifty at once, each into memory of its own that was touched before."""
    del blocks
    readers, prefix = 50, 80
    tokens, source = tokens_of(prefix), source_of(prefix)
    rooms = [np.zeros_like(source) for _ in range(readers)]
    reads: set[int] = set()

    def load(folder: str, count: int) -> float:
        with kvtier.open(folder, host_bytes=64 << 20, io_threads=count) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            started = time.perf_counter()
            jobs = [ns.load(ns.match(tokens), dst=room) for room in rooms[:count]]
            assert all(job.wait().ok for job in jobs)
            wall = time.perf_counter() - started
            reads.add(cache.stats()["disk"]["read_records"])
        return wall

    def copy_all() -> float:
        started = time.perf_counter()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda room: np.copyto(room, source), rooms))
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        with kvtier.open(folder, host_bytes=0, segment_bytes=1 << 30) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            assert ns.put(ns.match(tokens).digests, source, durability="flushed").wait()
        walls = [(load(folder, 1), load(folder, readers), copy_all()) for _ in range(rounds)]
    one, many, copies = (statistics.median(column) for column in zip(*walls, strict=True))
    assert reads == {prefix}, f"records read in the runs: {reads}"
    figure = (
        f"{prefix} records read; {many / one:.1f} x one reader ({one * 1e3:.1f} ms);"
        f" {many / copies:.2f} x the {readers} copies alone"
    )
    row(
        "G12",
        f"{readers} readers of one {prefix}-block prefix",
        figure,
        "80 records; wall <= 1.3 x",
    )


def g13(rounds: int, blocks: int) -> None:
    del rounds, blocks
    run_other("G13", "bench_gc.py")


def g14(rounds: int, blocks: int) -> None:
    del rounds, blocks
    run_other("G14", "bench_windows.py")


def run_other(goal: str, script: str) -> None:
    """A bench of its own; its lines say what it measures."""
    command = [sys.executable, str(HERE / script)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{goal:<4} {script} did not end well: {error}")
        return
    for line in done.stdout.splitlines():
        print(f"{goal:<4} {line}")


GOALS: dict[str, Callable[[int, int], None]] = {
    "G1": g1_g2,
    "G3": g3_g4,
    "G5": g5_g6_g7,
    "G8": g8_g9,
    "G10": g10,
    "G11": g11,
    "G12": g12,
    "G13": g13,
    "G14": g14,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help=f"of {', '.join(GOALS)}, separated by commas")
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(GOALS)
    unknown = set(chosen) - set(GOALS)
    if unknown:
        parser.error(f"no such goal: {', '.join(sorted(unknown))}")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    for goal in chosen:
        GOALS[goal](arguments.rounds, arguments.blocks)
    assert threading.active_count() < 50, "a cache left its threads behind"


if __name__ == "__main__":
    main()
