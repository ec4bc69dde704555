"""What the tiers cost beside the physical ceiling of the same run.

    python packages/kvtier/benches/bench_tiers.py [--blocks 256] [--rounds 5] [--cpu] [--json FILE]

Every figure stands next to its ceiling, measured in the same process and in alternating rounds: a
copy loop of numpy for memory, `pwritev` and `preadv` of 64 blocks for files. Only the ratios mean
something on a machine that does other work; `--cpu` counts processor time instead of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier

BLOCK_BYTES = 113_920  # payload of one 128-token block, FP4
BATCH = 64
LAYOUT = kvtier.LayoutSpec(
    128,
    {
        "block": kvtier.parts(
            *(
                (f"L{layer}.{part}", size * (2 if layer == 20 else 1))
                for layer in (2, 8, 14, 20)
                for part, size in (("index", 4_352), ("main", 18_432))
            )
        )
    },
)


clock: Callable[[], float] = time.perf_counter


def seconds(work: Callable[[], object]) -> float:
    started = clock()
    work()
    return clock() - started


def rates(rounds: int, nbytes: int, works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median GB/s of each piece of work, in alternating rounds."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return {name: nbytes / statistics.median(times) / 1e9 for name, times in taken.items()}


def identity(rounds: int) -> dict[str, float]:
    """match of 600 blocks in memory, and the chain hash alone."""
    cache = kvtier.open(host_bytes=1 << 20)
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 64))})
    ns = cache.namespace(layout, model="bench")
    tokens = np.random.default_rng(0).integers(0, 129_280, 600 * 128 + 1).astype(np.int64)
    digests = ns.match(tokens).digests
    ns.put(digests, np.zeros((600, 64), np.uint8))

    def match() -> None:
        ns.match(tokens).release()

    def hash_chain() -> None:
        ns.hasher().extend(tokens)

    grown = ns.hasher()
    grown.extend(tokens)
    one = tokens[:128]

    def extend() -> None:
        for _ in range(100):
            grown.extend(one)

    for work in (match, hash_chain):
        work()
    matches = sorted(seconds(match) for _ in range(20 * rounds))
    hashes = [seconds(hash_chain) for _ in range(4 * rounds)]
    extends = [seconds(extend) / 100 for _ in range(rounds)]
    cache.close()
    return {
        "match_600_blocks_p50_ms": statistics.median(matches) * 1e3,
        "match_600_blocks_p99_ms": matches[int(len(matches) * 0.99)] * 1e3,
        "hash_mtok_s": len(tokens) / statistics.median(hashes) / 1e6,
        "extend_one_block_us": statistics.median(extends) * 1e6,
    }


def host(rounds: int, blocks: int) -> dict[str, float]:
    """Batches of 64 blocks in and out of host memory against a copy loop of the same process."""
    cache = kvtier.open(host_bytes=(blocks + 1) * BLOCK_BYTES)
    ns = cache.namespace(LAYOUT, model="bench")
    tokens = np.random.default_rng(0).integers(0, 1 << 30, blocks * 128 + 1)
    digests = ns.match(tokens).digests
    source = np.random.default_rng(1).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    target = np.empty_like(source)
    spare = np.empty_like(source)
    ns.put(digests, source)
    match = ns.match(tokens)

    def copy_loop() -> None:
        for i in range(blocks):
            spare[i] = source[i]

    def get() -> None:
        for start in range(0, blocks, BATCH):
            chunk = slice(start, min(blocks, start + BATCH))
            assert ns.load(match, blocks=chunk, dst=target[chunk], wait=True).wait().ok

    generation = 0

    def put() -> None:
        nonlocal generation
        generation += 1
        fresh = [generation.to_bytes(2, "big") + digest[2:] for digest in digests]
        for start in range(0, blocks, BATCH):
            chunk = slice(start, min(blocks, start + BATCH))
            assert all(ns.put(fresh[chunk], source[chunk], parents=fresh[0]).accepted)

    copy_loop()
    get()
    found = rates(rounds, source.nbytes, {"memcpy": copy_loop, "get": get})
    match.release()
    found |= rates(rounds, source.nbytes, {"memcpy_beside_put": copy_loop, "put": put})
    cache.close()
    return {
        "memcpy_GB_s": found["memcpy"],
        "host_get_GB_s": found["get"],
        "host_get_over_memcpy": found["get"] / found["memcpy"],
        "host_put_GB_s": found["put"],
        "host_put_over_memcpy": found["put"] / found["memcpy_beside_put"],
    }


def disk(rounds: int, blocks: int, root: Path) -> dict[str, float]:
    """Verified reads and checksummed writes against raw calls on fresh files, without fsync."""
    tokens = np.random.default_rng(0).integers(0, 1 << 30, blocks * 128 + 1)
    source = np.random.default_rng(1).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
    target = np.empty_like(source)
    pad = bytes(768)
    number = 0

    def raw_write() -> None:
        nonlocal number
        number += 1
        fd = os.open(root / f"raw-{number}", os.O_CREAT | os.O_RDWR, 0o600)
        os.posix_fallocate(fd, 0, blocks * (BLOCK_BYTES + 768))
        for start in range(0, blocks, BATCH):
            vectors = [part for row in source[start : start + BATCH] for part in (row, pad)]
            os.pwritev(fd, vectors, start * (BLOCK_BYTES + 768))
        os.close(fd)

    def write() -> None:
        nonlocal number
        number += 1
        store = root / f"store-{number}"
        with kvtier.open(store, host_bytes=0, segment_bytes=1 << 30, sync_bytes=1 << 40) as cache:
            ns = cache.namespace(LAYOUT, model="bench")
            ns.put(ns.match(tokens).digests, source, copy=False, durability="flushed").wait()

    raw = root / "raw"
    fd = os.open(raw, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(fd, source.tobytes())

    def raw_read() -> None:
        for start in range(0, blocks, BATCH):
            rows = list(target[start : start + BATCH])
            os.preadv(fd, rows, start * BLOCK_BYTES)

    store = root / "read"
    cache = kvtier.open(store, host_bytes=0, segment_bytes=1 << 30)
    ns = cache.namespace(LAYOUT, model="bench")
    ns.put(ns.match(tokens).digests, source, durability="flushed", copy=False).wait()
    match = ns.match(tokens)

    def read() -> None:
        for start in range(0, blocks, BATCH):
            chunk = slice(start, min(blocks, start + BATCH))
            assert ns.load(match, blocks=chunk, dst=target[chunk], wait=True).wait().ok

    for warm in (raw_read, read, raw_write, write):
        warm()
    found = rates(rounds, source.nbytes, {"raw_read": raw_read, "read": read})
    assert np.array_equal(target, source)
    found |= rates(rounds, source.nbytes, {"raw_write": raw_write, "write": write})
    stats = cache.stats()["disk"]
    match.release()
    cache.close()
    os.close(fd)
    started = time.perf_counter()
    kvtier.open(store).close()
    return {
        "raw_preadv_GB_s": found["raw_read"],
        "disk_get_GB_s": found["read"],
        "disk_get_over_raw": found["read"] / found["raw_read"],
        "raw_pwritev_GB_s": found["raw_write"],
        "disk_put_GB_s": found["write"],
        "disk_put_over_raw": found["write"] / found["raw_write"],
        "file_bytes_over_payload": stats["written_file_bytes"] / stats["written_payload_bytes"],
        "reopen_ms": (time.perf_counter() - started) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.cpu:
        global clock
        clock = time.process_time
    figures: dict[str, float] = {"load_average_before": os.getloadavg()[0]}
    figures |= identity(arguments.rounds)
    figures |= host(arguments.rounds, arguments.blocks)
    with tempfile.TemporaryDirectory() as root:
        figures |= disk(arguments.rounds, arguments.blocks, Path(root))
    for name, value in figures.items():
        print(f"{name:<28} {value:10.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
