"""What codecs win and cost: ratio and speed by kind of data, beside memcpy, in one run.

    python benches/bench_compression.py [--store DIR]

Speeds are GB of expanded bytes for each second of one thread's processor time, medians, through the
calls that the cache makes. "stored" is the share of the bytes that is stored: parts that lose less
than a sixteenth stay as they are. `--store` adds the records of a cache directory, for example of
your engine; their parts are not known there, so each is one part.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.values import Status
from deepinfer_kvtier.flow.compression import CODECS, expand, open_compressor
from deepinfer_kvtier.log.compaction import read_slot
from deepinfer_kvtier.log.format import FLAG_SEALED

# One block of 128 tokens of DeepSeek-V4.1-Flash with FP4 caches.
PARTS = kvtier.parts(
    ("L2.index", 4_352),
    ("L2.main", 18_432),
    ("L8.index", 4_352),
    ("L8.main", 18_432),
    ("L14.index", 4_352),
    ("L14.main", 18_432),
    ("L20.index", 8_704),
    ("L20.main", 36_864),
)
BLOCK_BYTES = sum(part.size for part in PARTS)
BLOCKS, ROUNDS = 64, 5
MOST_RECORDS = 256


def gaussian_bf16(blocks: int) -> bytes:
    """Activations as simple theory has them: independent normal values, cut to BF16."""
    values = np.random.default_rng(0).standard_normal(blocks * BLOCK_BYTES // 2, dtype=np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def records_in(store: Path) -> dict[str, list[bytes]]:
    """Expanded payloads of a directory by kind and size; sealed ones say nothing and are left."""
    found: dict[str, list[bytes]] = defaultdict(list)
    with kvtier.open(store, read_only=True, host_bytes=0) as cache:
        assert cache.disk is not None
        for row in cache.disk.index.rows():
            read = read_slot(cache.disk, row)
            if isinstance(read, str) or read[0].flags & FLAG_SEALED:
                continue
            trailer, payload = read
            room = bytearray(trailer.expanded_bytes or len(payload))
            if not trailer.compressed:
                room[:] = payload
            elif expand(payload, [memoryview(room)]) is not Status.OK:
                continue
            name = f"{('block', 'state')[trailer.kind]} of {len(room):,} B"
            if len(found[name]) < MOST_RECORDS:
                found[name].append(bytes(room))
    return found


def seconds(work: Callable[[], object]) -> float:
    """Median processor seconds of this thread."""
    spent: list[float] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        spent.append(time.thread_time() - started)
    return statistics.median(spent)


def measure(title: str, payloads: Sequence[bytes], parts: Sequence[kvtier.Part] | None) -> None:
    """A row for each codec."""
    total = sum(map(len, payloads))
    room = bytearray(max(map(len, payloads)))

    def copy() -> None:
        for payload in payloads:
            room[: len(payload)] = payload

    memcpy = total / seconds(copy) / 1e9
    print(f"{title}: {len(payloads)} records, {total / 1e6:.1f} MB, memcpy {memcpy:.1f} GB/s")
    for name in CODECS:
        compressor = open_compressor(name)
        if compressor is None:
            continue
        chosen = [
            [(p.size, CODECS[name]) for p in parts] if parts else [(len(payload), CODECS[name])]
            for payload in payloads
        ]

        def compress(compressor=compressor, chosen=chosen) -> list[bytes | None]:
            pairs = zip(payloads, chosen, strict=True)
            return [compressor.compress(memoryview(payload), sizes) for payload, sizes in pairs]

        packed = [(stored, raw) for stored, raw in zip(compress(), payloads, strict=True)]
        smaller = [(stored, len(raw)) for stored, raw in packed if stored is not None]
        kept = sum(len(raw) if stored is None else len(stored) for stored, raw in packed)
        speed = total / seconds(compress) / 1e9

        def back(smaller=smaller) -> None:
            for stored, size in smaller:
                assert expand(memoryview(stored), [memoryview(room)[:size]]) is Status.OK

        reads = "nothing to expand"
        if smaller:
            rate = sum(size for _, size in smaller) / seconds(back) / 1e9
            reads = f"expand {rate:5.2f} GB/s ({rate / memcpy:.2f} of memcpy)"
        print(
            f"  {name:16} stored {kept / total:6.1%}"
            f"  compress {speed:5.2f} GB/s ({speed / memcpy:.2f})  {reads}"
        )


def through_the_cache(payloads: Sequence[bytes]) -> None:
    """`put` until it is flushed and a verified `load` from the directory, with and without."""
    source = np.frombuffer(b"".join(payloads), np.uint8).reshape(len(payloads), BLOCK_BYTES)
    layout = kvtier.LayoutSpec(128, {"block": PARTS})
    tokens = np.random.default_rng(1).integers(0, 1 << 17, 128 * len(payloads))
    for name in ("none", "zstd-1"):
        put: list[float] = []
        load: list[float] = []
        for _ in range(ROUNDS):
            with (
                tempfile.TemporaryDirectory() as folder,
                kvtier.open(folder, compression=name, host_bytes=0) as cache,
            ):
                ns = cache.namespace(layout, model="bench")
                digests = ns.match(tokens).digests
                started = time.process_time()
                assert ns.put(digests, source, copy=False, durability="flushed").wait()
                put.append(time.process_time() - started)
                written = cache.stats()["disk"]["written_file_bytes"]
                room = np.empty_like(source)
                with ns.match(tokens, leave_last=False) as match:
                    started = time.process_time()
                    assert ns.load(match, dst=room, wait=True).wait().ok
                    load.append(time.process_time() - started)
                assert np.array_equal(room, source)
        rates = [source.nbytes / statistics.median(times) / 1e9 for times in (put, load)]
        print(
            f"  {name:16} file bytes {written / source.nbytes:6.1%}"
            f"  put {rates[0]:5.2f} GB/s  load {rates[1]:5.2f} GB/s (all threads)"
        )


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--store", type=Path, default=None, help="add the records of a directory")
    store = parser.parse_args().store
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")
    gaussian = gaussian_bf16(BLOCKS)
    cut = [gaussian[at : at + BLOCK_BYTES] for at in range(0, len(gaussian), BLOCK_BYTES)]
    noise = np.random.default_rng(0).bytes(BLOCKS * BLOCK_BYTES)
    blocks = [noise[at : at + BLOCK_BYTES] for at in range(0, len(noise), BLOCK_BYTES)]
    measure("random bytes, as FP4 caches nearly are", blocks, PARTS)
    measure("BF16, independent normal values", cut, PARTS)
    if store is not None:
        for title, payloads in sorted(records_in(store).items()):
            measure(title, payloads, None)
    print("through the cache, BF16 normal values")
    through_the_cache(cut)


if __name__ == "__main__":
    main()
