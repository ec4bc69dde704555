"""Speed of a cache on one file system, beside plain writes and reads of the same bytes there."""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.api.cache import open
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import LayoutSpec, Part
from deepinfer_kvtier.log.direct_io import IoName
from deepinfer_kvtier.log.format import PAGE

_BATCH = 64


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Rates in GB/s (10^9 bytes), and the ratio to plain calls that take the same way.

    io: "posix" = through the page cache, "odirect" = past it.
    """

    io: str
    blocks: int
    block_bytes: int
    put_gb_s: float
    plain_write_gb_s: float
    put_ratio: float
    load_gb_s: float
    plain_read_gb_s: float
    load_ratio: float


def run_bench(where: Path, *, blocks: int, block_bytes: int, io: IoName = "posix") -> BenchReport:
    """Write and read `blocks` blocks in a temporary directory under `where`, and remove it.

    raises: ConfigError when there is no directory to write to, or for "odirect" where the file
            system refuses it.
    """
    if not where.is_dir():
        raise ConfigError(f"{where} is not a directory")
    root = where / f".kvtier-bench-{secrets.token_hex(4)}"
    data = np.frombuffer(os.urandom(_BATCH * block_bytes), np.uint8).reshape(_BATCH, block_bytes)
    rounds = max(1, blocks // _BATCH)
    try:
        root.mkdir()
        put_s, load_s = _cached(root / "store", data, rounds, io)
        write_s, read_s = _plain(root / "plain", data, rounds, direct=io == "odirect")
    except OSError as cause:
        raise ConfigError(f"cannot write to {where}: {cause.strerror}") from cause
    finally:
        shutil.rmtree(root, ignore_errors=True)
    total = rounds * data.nbytes / 1e9
    return BenchReport(
        io=io,
        blocks=rounds * _BATCH,
        block_bytes=block_bytes,
        put_gb_s=round(total / put_s, 3),
        plain_write_gb_s=round(total / write_s, 3),
        put_ratio=round(write_s / put_s, 3),
        load_gb_s=round(total / load_s, 3),
        plain_read_gb_s=round(total / read_s, 3),
        load_ratio=round(read_s / load_s, 3),
    )


def _plain(
    path: Path, data: NDArray[np.uint8], rounds: int, *, direct: bool
) -> tuple[float, float]:
    """Seconds of plain writes and reads of as many bytes, in whole pages."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    size = -(-data.nbytes // PAGE) * PAGE
    room = memoryview(mmap.mmap(-1, size))
    room[: data.nbytes] = data.reshape(-1).data
    fd = os.open(path, flags, 0o600)
    try:
        started = time.perf_counter()
        for number in range(rounds):
            os.pwritev(fd, [room], number * size)
        written = time.perf_counter()
        for number in range(rounds):
            os.preadv(fd, [room], number * size)
        return written - started, time.perf_counter() - written
    finally:
        os.close(fd)


def _cached(root: Path, data: NDArray[np.uint8], rounds: int, io: IoName) -> tuple[float, float]:
    layout = LayoutSpec(128, {"block": (Part("kv", 0, data.shape[1]),)})
    with open(root, host_bytes=0, auto_gc=False, io=io) as cache:
        ns = cache.namespace(layout, model="bench", salt="bench")
        tokens = [np.full(_BATCH * 128, number, np.uint32) for number in range(rounds)]
        started = time.perf_counter()
        for prompt in tokens:
            digests = ns.match(prompt, want=("block",), leave_last=False).digests
            if not ns.put(digests, data, durability="flushed").wait():
                raise ConfigError(f"the cache at {root} did not take the blocks; is the disk full?")
        written = time.perf_counter()
        if reason := cache.stats()["io"].get("reason"):
            raise ConfigError(f"io={io!r} is of no use here: {reason}")
        room = np.empty_like(data)
        for prompt in tokens:
            with ns.match(prompt, want=("block",), leave_last=False) as match:
                if not ns.load(match, dst=room, wait=True).wait().ok:
                    raise ConfigError(f"the cache at {root} did not give the blocks back")
        return written - started, time.perf_counter() - written
