"""Finding records in segment files without any index, by their trailers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.store import format as fmt
from deepinfer_kvtier.store.segments import parse_segment_name

_CHUNK_BYTES = 4 << 20


def scan_folder(folder: Path, io: IoEngine) -> NDArray[Any]:
    """Index entries of every whole record in a writer's segments. raises: OSError."""
    found: list[NDArray[Any]] = []
    for name in sorted(io.listdir(folder)):
        parsed = parse_segment_name(name)
        if parsed is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            fd = io.open_read(folder / name)
            try:
                entries, _ = scan_slots(fd, fmt.PAGE, parsed[2], io)
            finally:
                io.close(fd)
            found.extend(entries)
    return np.concatenate(found) if found else _NOTHING


def scan_slots(
    fd: int, start: int, number: int, io: IoEngine, *, verify: bool = False
) -> tuple[list[NDArray[Any]], int]:
    """Walk slots by looking for the trailer that says how long its own slot is.

    verify:  leave out records whose bytes do not have their checksum.
    returns: entries, and where the last whole slot ends.
    """
    found: list[NDArray[Any]] = []
    slot = at = start
    chunk = bytearray(_CHUNK_BYTES)
    while True:
        got = io.preadv(fd, [chunk], at) // fmt.PAGE * fmt.PAGE
        if got <= 0:
            return found, slot
        words = np.frombuffer(chunk, dtype="<u8", count=got // 8)
        restart = None
        for word in np.flatnonzero(words == fmt.TRAILER_WORD):
            position = int(word) * 8
            if at + position < slot:
                continue
            if position + fmt.TRAILER_BYTES > got:
                restart = at + position // fmt.PAGE * fmt.PAGE
                break
            trailer = fmt.parse_trailer(memoryview(chunk)[position : position + fmt.TRAILER_BYTES])
            expected = at + position - slot
            if trailer is None or fmt.trailer_offset(trailer.payload_bytes) != expected:
                continue
            if not verify or _checksum_at(fd, slot, trailer.payload_bytes, io) == trailer.checksum:
                found.append(_entry_of(trailer, number, slot))
            slot += fmt.slot_bytes(trailer.payload_bytes)
        if restart is not None and restart > at:
            at = restart
        elif got < len(chunk):
            return found, slot
        else:
            at += got


def _checksum_at(fd: int, offset: int, length: int, io: IoEngine) -> bytes:
    hasher = xxhash.xxh3_128()
    room = memoryview(bytearray(min(length, _CHUNK_BYTES)))
    while length:
        got = io.preadv(fd, [room[:length]], offset)
        if got <= 0:
            break
        hasher.update(room[:got])
        offset, length = offset + got, length - got
    return hasher.digest()


def _entry_of(trailer: fmt.Trailer, number: int, slot: int) -> NDArray[Any]:
    entry = np.zeros(1, dtype=fmt.ENTRY)
    lo, hi = fmt.key_columns([trailer.digest])
    entry["key_lo"], entry["key_hi"] = lo, hi
    entry["parent"] = int.from_bytes(trailer.parent[:8], "little")
    entry["segment"] = number
    entry["page"] = slot // fmt.PAGE
    entry["length"] = trailer.payload_bytes
    entry["kind"], entry["cls"] = trailer.kind, trailer.cls
    entry["flags"] = trailer.flags & fmt.FLAG_APPROXIMATE
    entry["created_s"], entry["created_ms"] = divmod(trailer.created_ms, 1000)
    entry["depth"] = trailer.depth
    entry["sum"] = int.from_bytes(trailer.checksum[-8:], "little")
    entry["shard"] = trailer.shard
    entry["generation"] = trailer.generation
    entry["namespace"] = trailer.namespace
    return entry


_NOTHING: NDArray[Any] = np.zeros(0, dtype=fmt.ENTRY)
