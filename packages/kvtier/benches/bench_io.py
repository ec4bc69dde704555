"""Segments through the page cache and past it (O_DIRECT), alternating in one run on one disk.

    python packages/kvtier/benches/bench_io.py [FOLDER]

FOLDER lies on the disk to measure (default: here). "cold" = what the page cache holds of the files
was given up before; "warm" = read a second time. Beside each: plain `preadv` of the same files,
cold, in pieces of 1 MiB. Medians of the rounds.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier

BLOCKS, BLOCK_BYTES, ROUNDS = 1024, 113_920, 5
LAYOUT = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", BLOCK_BYTES))})
PROMPTS = [np.arange(64 * 128, dtype=np.uint32) + (i << 20) for i in range(BLOCKS // 64)]


def segments(store: Path) -> list[Path]:
    return sorted(store.rglob("*.kvs"))


def forget(store: Path) -> None:
    """Give up what the page cache holds of the segments."""
    for path in segments(store):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain(store: Path) -> float:
    """GB/s of reading the segments with nothing else."""
    room, total = memoryview(mmap.mmap(-1, 1 << 20)), 0
    started = time.perf_counter()
    for path in segments(store):
        fd = os.open(path, os.O_RDONLY)
        at = 0
        while got := os.preadv(fd, [room], at):
            at += got
        total += at
        os.close(fd)
    return total / (time.perf_counter() - started) / 1e9


def timed(work) -> tuple[float, float]:
    """GB/s, and processor microseconds a block."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return BLOCKS * BLOCK_BYTES / wall / 1e9, cpu / BLOCKS * 1e6


def round_of(io: str, where: str) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory(dir=where) as folder:
        store = Path(folder, "kv")
        settings = {"io": io, "host_bytes": 0, "auto_gc": False, "min_free_share": 0.0}
        with kvtier.open(store, **settings) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            data = np.frombuffer(os.urandom(64 * BLOCK_BYTES), np.uint8).reshape(64, BLOCK_BYTES)

            def put():
                for prompt in PROMPTS:
                    digests = ns.match(prompt, leave_last=False).digests
                    assert ns.put(digests, data, durability="flushed").wait()
                cache.flush(fsync=True)

            def load():
                for prompt in PROMPTS:
                    with ns.match(prompt, leave_last=False) as match:
                        assert ns.load(match, dst=room, wait=True).wait().ok

            room = np.empty_like(data)
            found = {"put, fsync": timed(put)}
            forget(store)
            found["plain read, cold"] = (plain(store), 0.0)
            forget(store)
            found["load, cold"] = timed(load)
            found["load, warm"] = timed(load)
            reason = cache.stats()["io"].get("reason")
            if reason:
                raise SystemExit(f"{io}: {reason}")
            return found


def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else "."
    results: dict[str, list[dict[str, tuple[float, float]]]] = {"posix": [], "odirect": []}
    for _ in range(ROUNDS):
        for io, rounds in results.items():
            rounds.append(round_of(io, where))
    print(f"{BLOCKS} blocks of {BLOCK_BYTES} bytes; medians of {ROUNDS} alternating rounds")
    for what in results["posix"][0]:
        rates = {
            io: [statistics.median(r[what][i] for r in rounds) for i in (0, 1)]
            for io, rounds in results.items()
        }
        (cached, cached_us), (direct, direct_us) = rates["posix"], rates["odirect"]
        print(
            f"{what:18} page cache {cached:6.2f} GB/s {cached_us:5.0f} us cpu | direct"
            f" {direct:6.2f} GB/s {direct_us:5.0f} us cpu | direct / page cache"
            f" {direct / cached:.2f}"
        )


if __name__ == "__main__":
    main()
