"""Snapshots of one writer's index log, so that opening does not replay it from its first frame.

`snap-<n>.kvi` is a 4,096-byte header and entries as in the log, sorted by key: what the log's first
`next_frame` frames still mean. Written to a temporary name, synced, renamed. The last two are kept,
and the log before the older of them is given back to the file system: a damaged snapshot is ignored
and costs the longer way round, never a record.
"""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.io import IoEngine, read_fully, write_all
from deepinfer_kvtier.store import format as fmt

SNAPSHOT_MAGIC: Final = b"KVTSNP1\0"
# magic, format, number, next frame, count, store id, writer id, xxh3_128 of the entries
_HEADER = struct.Struct("<8sHxxIQQ16s16s16s")
_CRC = struct.Struct("<I")
_MAX_ENTRIES: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries of the log before frame `next_frame`, without those that mean nothing any more."""

    number: int
    next_frame: int
    entries: NDArray[Any]


def snapshot_name(number: int) -> str:
    """File name of a snapshot."""
    return f"snap-{number}.kvi"


def numbers_of(names: list[str]) -> list[int]:
    """Numbers of the snapshots among file names, newest first."""
    found = [name[5:-4] for name in names if name.startswith("snap-") and name.endswith(".kvi")]
    return sorted((int(number) for number in found if number.isdigit()), reverse=True)


def write_snapshot(
    folder: Path, snapshot: Snapshot, store: bytes, writer: bytes, io: IoEngine
) -> int:
    """Publish a snapshot; returns its bytes. raises: OSError."""
    entries = np.ascontiguousarray(snapshot.entries)
    raw = entries.view(np.uint8).data if len(entries) else memoryview(b"")
    body = _HEADER.pack(
        SNAPSHOT_MAGIC,
        fmt.FORMAT_VERSION,
        snapshot.number,
        snapshot.next_frame,
        len(entries),
        store,
        writer,
        xxhash.xxh3_128_digest(raw),
    )
    header = (body + _CRC.pack(zlib.crc32(body))).ljust(fmt.PAGE, b"\0")
    temporary = folder / f".snap-{snapshot.number}.tmp"
    io.unlink(temporary)
    fd = io.create(temporary)
    try:
        write_all(io, fd, [header, raw], 0)
        io.datasync(fd)
    finally:
        io.close(fd)
    io.rename(temporary, folder / snapshot_name(snapshot.number))
    return len(header) + len(raw)


def read_newest(
    folder: Path, store: bytes, writer: bytes, io: IoEngine, *, beyond: int = 0
) -> tuple[Snapshot | None, int]:
    """The newest good snapshot that reaches beyond a frame, and how many damaged ones were met.

    raises: OSError other than "the file is gone".
    """
    damaged = 0
    try:
        names = io.listdir(folder)
    except FileNotFoundError:
        return None, 0
    for number in numbers_of(names):
        with contextlib.suppress(FileNotFoundError):
            snapshot = _read(folder / snapshot_name(number), store, writer, io)
            if snapshot is None:
                damaged += 1
            elif snapshot.next_frame > beyond:
                return snapshot, damaged
    return None, damaged


def damaged_snapshots(folder: Path, store: bytes, writer: bytes, io: IoEngine) -> list[Path]:
    """Snapshots of a writer that cannot be used. raises: OSError."""
    try:
        names = io.listdir(folder)
    except FileNotFoundError:
        return []
    damaged: list[Path] = []
    for number in numbers_of(names):
        path = folder / snapshot_name(number)
        with contextlib.suppress(FileNotFoundError):
            if _read(path, store, writer, io) is None:
                damaged.append(path)
    return damaged


def _read(path: Path, store: bytes, writer: bytes, io: IoEngine) -> Snapshot | None:
    fd = io.open_read(path)
    try:
        header = bytearray(fmt.PAGE)
        if io.preadv(fd, [header], 0) < fmt.PAGE:
            return None
        body = header[: _HEADER.size]
        (crc,) = _CRC.unpack_from(header, _HEADER.size)
        magic, version, number, frame, count, got_store, got_writer, digest = _HEADER.unpack(body)
        good = (magic, version, got_store, got_writer, zlib.crc32(body), count <= _MAX_ENTRIES)
        if good != (SNAPSHOT_MAGIC, fmt.FORMAT_VERSION, store, writer, crc, True):
            return None
        raw: NDArray[np.uint8] = np.empty(count * fmt.ENTRY.itemsize, dtype=np.uint8)
        if read_fully(io, fd, [raw.data], fmt.PAGE, raw.nbytes) < raw.nbytes:
            return None
    finally:
        io.close(fd)
    if xxhash.xxh3_128_digest(raw.data) != digest:
        return None
    return Snapshot(number, frame, raw.view(fmt.ENTRY))


def compact(entries: NDArray[Any], alive: AbstractSet[int]) -> NDArray[Any]:
    """Entries of one log, in log order, reduced to what still matters, sorted by key.

    alive: numbers of the writer's segments whose files exist.
    """
    flags = entries["flags"]
    here = np.isin(entries["segment"], np.fromiter(alive, dtype=np.uint32, count=len(alive)))
    is_data = (flags & fmt.CONTROL_FLAGS) == 0
    tombs = _last_of_each_key(entries[(flags & fmt.FLAG_TOMB_KEY) != 0])
    data = entries[is_data & here]
    data = data[~_buried(data, tombs)]
    parts = [
        data[np.argsort(data["key_lo"], kind="stable")],
        tombs,
        _last_of_each_key(entries[(flags & fmt.FLAG_TOUCH) != 0]),
        _unique(entries[(flags & fmt.FLAG_TOMB_SEGMENT) != 0]),
        entries[((flags & (fmt.FLAG_SEAL | fmt.FLAG_SEGMENT)) != 0) & here],
        entries[(flags & fmt.FLAG_LOG_END) != 0][-1:],
    ]
    return np.concatenate(parts)


def _last_of_each_key(entries: NDArray[Any]) -> NDArray[Any]:
    keys = entries[["key_lo", "key_hi", "kind", "shard"]][::-1]
    _, last = np.unique(keys, return_index=True)
    return entries[::-1][last]


def _unique(entries: NDArray[Any]) -> NDArray[Any]:
    _, first = np.unique(entries[["key_lo", "key_hi", "segment"]], return_index=True)
    return entries[np.sort(first)]


def _buried(data: NDArray[Any], tombs: NDArray[Any]) -> NDArray[np.bool_]:
    """Records stored no later than the tombstone of their key."""
    result = np.zeros(len(data), dtype=np.bool_)
    stamps = {_key(tomb): _stamp(tomb) for tomb in tombs}
    for i in np.flatnonzero(np.isin(data["key_lo"], tombs["key_lo"])):
        result[i] = _stamp(data[i]) <= stamps.get(_key(data[i]), -1)
    return result


def _key(entry: Any) -> tuple[int, int, int, int]:
    return int(entry["key_lo"]), int(entry["key_hi"]), int(entry["kind"]), int(entry["shard"])


def _stamp(entry: Any) -> int:
    return int(entry["created_s"]) * 1000 + int(entry["created_ms"])
