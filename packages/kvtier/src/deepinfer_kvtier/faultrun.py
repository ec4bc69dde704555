"""A long run on files that fail in every way we know, with every byte that comes back compared.

    python -m deepinfer_kvtier.faultrun --reads 1000000 [--where DIR] [--compression CODEC]

A record is the keyed stream of its digest, so each one can be checked without having been kept.
The process that uses the cache is "killed" and its power "fails" again and again. Exit code 1 when
a single wrong byte came back; what was injected and what was read is printed.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.api.cache import Cache, open
from deepinfer_kvtier.api.namespace import Namespace
from deepinfer_kvtier.base.errors import ConfigError, StoreFormatError
from deepinfer_kvtier.base.files import IoEngine, PosixIo
from deepinfer_kvtier.base.values import LayoutSpec, Status, parts
from deepinfer_kvtier.faults import Effect, FaultIo
from deepinfer_kvtier.flow.compression import CODECS, installed, require_library
from deepinfer_kvtier.testing import ManualClock, payload_of

PLAN: dict[str, dict[Effect, float]] = {
    "preadv": {"eio": 0.005, "short": 0.02, "flip": 0.02, "estale": 0.003, "delay": 0.002},
    "pwritev": {
        "eio": 0.005,
        "enospc": 0.003,
        "short": 0.02,
        "flip": 0.02,
        "lost": 0.01,
        "torn": 0.01,
        "duplicate": 0.02,
        "delay": 0.002,
    },
    "datasync": {"eio": 0.02, "reordered": 0.2},
    "create": {"enospc": 0.01},
    "open_read": {"eio": 0.005, "estale": 0.005},
    "unlink": {"eio": 0.02},
    "truncate": {"eio": 0.01},
    "disk_bytes": {"stale": 0.1},
}

_MAX_BLOCKS = 48
_CHAINS = 40
_STORE_READS = 25_000


@dataclass(frozen=True, slots=True)
class _Records:
    """What the blocks of a run are, and how they are stored.

    repeat: every byte follows so often on itself, so that there is something to compress.
    """

    index_bytes: int = 200
    main_bytes: int = 800
    repeat: int = 1
    compression: str = "none"

    @property
    def block_bytes(self) -> int:
        return self.index_bytes + self.main_bytes

    @property
    def layout(self) -> LayoutSpec:
        return LayoutSpec(
            128, {"block": parts(("index", self.index_bytes), ("main", self.main_bytes))}
        )

    def content(self, digest: bytes) -> NDArray[np.uint8]:
        return np.repeat(payload_of(digest, self.block_bytes // self.repeat), self.repeat)


def _records_for(compression: str) -> _Records:
    """Blocks of one page are stored as they are, so compressed ones have several."""
    if compression == "none":
        return _Records()
    return _Records(index_bytes=2_000, main_bytes=14_000, repeat=8, compression=compression)


@dataclass(slots=True)
class FaultRun:
    """What one run did.

    reads:     records that were reported good, all of them compared; `from_disk` were not in
               memory when they were found.
    wrong:     those that were not good.
    misses:    records found at first and then reported as not loaded.
    """

    reads: int = 0
    from_disk: int = 0
    wrong: int = 0
    misses: int = 0
    lives: Counter[str] = field(default_factory=lambda: Counter[str]())
    injected: Counter[str] = field(default_factory=lambda: Counter[str]())
    noticed: Counter[str] = field(default_factory=lambda: Counter[str]())

    def __add__(self, other: FaultRun) -> FaultRun:
        return FaultRun(
            self.reads + other.reads,
            self.from_disk + other.from_disk,
            self.wrong + other.wrong,
            self.misses + other.misses,
            self.lives + other.lives,
            self.injected + other.injected,
            self.noticed + other.noticed,
        )


def run_faults(
    root: Path,
    *,
    reads: int,
    seed: int = 0,
    plan: Mapping[str, Mapping[Effect, float]] | None = None,
    engine: Callable[[], IoEngine] = PosixIo,
    compression: str = "none",
) -> FaultRun:
    """Store, load, drop and collect until `reads` records came back as good, each one compared.

    engine: makes what does the file operations that are not made to fail.
    """
    if compression != "none":
        require_library()  # else no cache would ever open
    run = FaultRun()
    records = _records_for(compression)
    chooser = random.Random(seed)
    clock = ManualClock()
    prompts = [
        np.random.default_rng(chain).integers(0, 1 << 20, _MAX_BLOCKS * 128)
        for chain in range(_CHAINS)
    ]
    life = 0
    while run.reads < reads and not run.wrong:
        life += 1
        io = FaultIo(seed * 1_000_003 + life, plan or PLAN, track=True, over=engine())
        try:
            cache = _open(root, clock, io, records)
        except (ConfigError, StoreFormatError):
            run.lives["not opened"] += 1
            io.crash()
            continue
        _live(cache, records, prompts, chooser, clock, run, reads)
        _end(cache, io, chooser, run)
        run.injected.update(io.injected)
    return run


def _open(root: Path, clock: ManualClock, io: FaultIo, records: _Records) -> Cache:
    return open(
        root,
        io=io,
        clock=clock,
        host_bytes=20 * records.block_bytes,
        compression=records.compression,
        segment_bytes=1 << 17,
        quota_bytes=8 << 20,
        min_free_share=0.0,
        commit_delay_s=0.0,
        sync_bytes=1 << 16,
    )


def _live(
    cache: Cache,
    records: _Records,
    prompts: list[NDArray[np.int64]],
    chooser: random.Random,
    clock: ManualClock,
    run: FaultRun,
    limit: int,
) -> None:
    """One process: some hundred operations of every kind."""
    ns = cache.namespace(records.layout, model="faults", salt="faults")
    for _ in range(chooser.randrange(50, 300)):
        if run.reads >= limit or run.wrong:
            return
        tokens = chooser.choice(prompts)[: 128 * chooser.randrange(1, _MAX_BLOCKS + 1)]
        match chooser.choices(("load", "store", "drop", "collect"), (80, 15, 2, 3))[0]:
            case "load":
                _load(ns, records, tokens, run)
            case "store":
                _store(ns, records, tokens, chooser)
                cache.flush(0.05)
            case "drop":
                digests = ns.match(tokens, want=("block",), leave_last=False).digests
                ns.drop(digests[chooser.randrange(len(digests)) :])
            case _:
                clock.advance(chooser.choice((11, 600, 3_600)))
                try:
                    cache.gc()
                except OSError:
                    run.noticed["collections that failed"] += 1


def _store(
    ns: Namespace, records: _Records, tokens: NDArray[np.int64], chooser: random.Random
) -> None:
    digests = ns.match(tokens, want=("block",), leave_last=False).digests
    blocks = [records.content(digest) for digest in digests]
    durability = chooser.choice(("behind", "flushed", "fsync"))
    ns.put(digests, blocks, cls=chooser.choice(("chat", "scratch")), durability=durability)


def _load(ns: Namespace, records: _Records, tokens: NDArray[np.int64], run: FaultRun) -> None:
    with ns.match(tokens, want=("block",), leave_last=False) as match:
        room = np.full((match.n_blocks, records.block_bytes), 0xAA, dtype=np.uint8)
        result = ns.load(match, dst=room, wait=True).wait()
        tiers = [span.tier for span in match.spans for _ in range(span.count)]
        for i, status in enumerate(result.blocks):
            if status is not Status.OK:
                run.misses += 1
                continue
            run.reads += 1
            run.from_disk += tiers[i] == "disk"
            if not np.array_equal(room[i], records.content(match.digests[i])):
                run.wrong += 1


def _end(cache: Cache, io: FaultIo, chooser: random.Random, run: FaultRun) -> None:
    """A life ends in order, by kill -9, or by a power failure."""
    for name in ("corrupt", "digest_mismatch", "short_reads", "read_errors", "expanded_records"):
        run.noticed[name] += cache.stats()["disk"].get(name, 0)
    end = chooser.choice(("closed", "killed", "power lost"))
    run.lives[end] += 1
    if end == "killed":
        io.crash()
    elif end == "power lost":
        io.power_loss()
    cache.close(timeout=0.2 if end == "closed" else 0)


def _one_store(where: Path | None, reads: int, seed: int, compression: str) -> FaultRun:
    """A run on a directory of its own, removed afterwards."""
    root = Path(tempfile.mkdtemp(prefix="kvtier-faults-", dir=where))
    try:
        return run_faults(root / "store", reads=reads, seed=seed, compression=compression)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> None:
    """Entry point of `python -m deepinfer_kvtier.faultrun`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reads", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", type=Path, default=None, help="file system to run on")
    parser.add_argument("--compression", choices=list(CODECS), default="none")
    given = parser.parse_args()
    if given.compression != "none" and not installed():
        print(
            'compression needs the extra "zstd": pip install "./packages/kvtier[zstd]"',
            file=sys.stderr,
        )
        sys.exit(2)
    started = time.process_time()
    run = FaultRun()
    seed = given.seed
    while run.reads < given.reads and not run.wrong:
        reads = min(_STORE_READS, given.reads - run.reads)
        run += _one_store(given.where, reads, seed, given.compression)
        seed += 1
        # A run of many minutes that is stopped has still said how far it came.
        print(f"{run.reads:,} compared, wrong: {run.wrong}", file=sys.stderr, flush=True)
    for title, counter in (
        ("injected", run.injected),
        ("noticed", run.noticed),
        ("lives", run.lives),
    ):
        print(f"{title}: " + ", ".join(f"{name} {n:,}" for name, n in sorted(counter.items())))
    spent_s = time.process_time() - started
    print(
        f"{run.reads:,} records came back as good and were compared, {run.from_disk:,} of them"
        f" from disk; {run.misses:,} did not come back; wrong: {run.wrong}"
        f" ({spent_s:.0f} s of CPU, seeds {given.seed} to {seed - 1})"
    )
    if run.wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
