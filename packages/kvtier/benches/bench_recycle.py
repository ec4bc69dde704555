"""Would it pay to write over the file of an evicted segment instead of deleting it?

    python packages/kvtier/benches/bench_recycle.py [--folder FOLDER] [--turns 24]

A cache that is full evicts its oldest segment whenever it begins a new one. Three ways to do that
take turns here, each with eight segments of 58 MB: delete the old file and write a fresh one (what
the package does); write over the old file, while its pages are still in memory; write over it when
they are not, as after an eviction of what nobody has read for long. Processor time a block of
113,920 bytes, deletion included; beside it, what the cache spends on a block in all when it is
full. The slowest fresh file of the first round is printed apart: its pages are memory that the host
of a virtual machine hands out for the first time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from goal_common import BLOCK_BYTES, LAYOUT, source_of, tokens_of

import deepinfer_kvtier as kvtier

SLOT, BATCH, BATCHES, SEGMENTS = 114_688, 64, 8, 8
BLOCKS = BATCH * BATCHES


def fill(fd: int, batch: list[bytes]) -> None:
    for number in range(BATCHES):
        os.pwritev(fd, batch, number * BATCH * SLOT)


def fresh(path: Path, batch: list[bytes]) -> None:
    """Delete the old segment and write a new file."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_EXCL, 0o600)
    os.posix_fallocate(fd, 0, BLOCKS * SLOT)
    fill(fd, batch)
    os.close(fd)


def over(path: Path, batch: list[bytes]) -> None:
    """Write over the old segment."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    fill(fd, batch)
    os.close(fd)


def settle(path: Path, *, forget: bool) -> None:
    """Let the disk have it all; forget: nothing of it stays in memory."""
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)
    if forget:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


WAYS: dict[str, tuple[Callable[[Path, list[bytes]], None], bool]] = {
    "deleted, a fresh file": (fresh, False),
    "written over, in memory": (over, False),
    "written over, not in memory": (over, True),
}


def full_cache(folder: Path, turns: int) -> float:
    """Processor time (us) of a block that goes through a cache at its quota, all threads."""
    tokens, source = tokens_of(BLOCKS), source_of(BLOCKS)
    quota = {"quota_bytes": SEGMENTS * BLOCKS * SLOT, "floor_s": 0, "min_free_share": 0.0}
    times: list[float] = []
    with kvtier.open(folder, host_bytes=0, queue_bytes=1 << 30, **quota) as cache:
        ns = cache.namespace(LAYOUT, model="bench")
        digests = ns.match(tokens).digests
        for turn in range(SEGMENTS + turns):
            fresh_names = [turn.to_bytes(4, "big") + digest[4:] for digest in digests]
            started = time.process_time()
            put = ns.put(
                fresh_names, source, parents=fresh_names[0], copy=False, durability="fsync"
            )
            assert put.wait()
            times.append((time.process_time() - started) / BLOCKS * 1e6)
        assert cache.stats()["disk"]["gc_evicted_segments"], "nothing was evicted"
    return statistics.median(times[SEGMENTS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--turns", type=int, default=3 * SEGMENTS)
    given = parser.parse_args()
    batch = [os.urandom(SLOT)] * BATCH
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for turn in range(SEGMENTS + given.turns):
            for name, (write, forget) in WAYS.items():
                path = Path(folder) / f"{name.replace(' ', '-')}-{turn % SEGMENTS}"
                started = time.thread_time()
                (write if path.exists() else fresh)(path, batch)
                times[name].append((time.thread_time() - started) / BLOCKS * 1e6)
                settle(path, forget=forget)
    for name, some in times.items():
        print(f"{name:30} {statistics.median(some[SEGMENTS:]):6.1f} us a block")
    slowest = max(max(some[:SEGMENTS]) for some in times.values())
    print(f"{'fresh, in memory never used':30} {slowest:6.1f} us a block")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        cost = full_cache(Path(folder), given.turns)
    print(f"{'the cache in all, at its quota':30} {cost:6.1f} us a block of {BLOCK_BYTES:,} bytes")


if __name__ == "__main__":
    main()
