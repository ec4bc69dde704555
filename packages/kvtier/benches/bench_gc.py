"""Cost of collection: expired segments beside the removal of one file a block.

    python benches/bench_gc.py [--blocks 10000]

Prints CPU seconds of both, in the same directory and run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock

BLOCK_BYTES = 16_384


def collect(root: Path, blocks: int) -> float:
    """CPU seconds of the collection that drops everything."""
    clock = ManualClock()
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", BLOCK_BYTES))})
    data = np.zeros((500, BLOCK_BYTES), np.uint8)
    kvtier.init(root, min_free_share=0.0)
    with kvtier.open(root, clock=clock, host_bytes=0, auto_gc=False) as cache:
        ns = cache.namespace(layout, model="bench", salt="bench")
        for chain in range(blocks // 500):
            hasher = ns.hasher()
            hasher.extend(np.full(500 * 128, chain))
            ns.put(hasher.digests, data, cls="scratch", durability="flushed").wait()
        cache.disk.seal()
        clock.advance(2 * 3600)
        started = time.process_time()
        report = cache.gc()
        spent = time.process_time() - started
        if report.records_removed != blocks:
            raise SystemExit(f"expected {blocks} records to go, {report.records_removed} went")
        return spent


def remove_files(root: Path, blocks: int) -> float:
    """CPU seconds of unlinking one file for each block."""
    root.mkdir()
    block = bytes(BLOCK_BYTES)
    for i in range(blocks):
        (root / str(i)).write_bytes(block)
    started = time.process_time()
    for i in range(blocks):
        (root / str(i)).unlink()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000)
    blocks = parser.parse_args().blocks // 500 * 500
    root = Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
    try:
        files = remove_files(root / "files", blocks)
        segments = collect(root / "store", blocks)
    finally:
        shutil.rmtree(root)
    print(f"{blocks:,} expired blocks of {BLOCK_BYTES:,} bytes, CPU seconds")
    print(f"  one collection      {segments:8.3f}")
    print(f"  one unlink a block  {files:8.3f}   ({files / segments:.1f} times as long)")


if __name__ == "__main__":
    main()
