"""What a killed process left behind: index what it wrote but did not index, then end its log.

The kernel drops a process's lock on its folder when it dies, so holding that lock means its owner
is gone and nobody else is adopting it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier import format as fmt
from deepinfer_kvtier.io import IoEngine
from deepinfer_kvtier.logs import LogReader
from deepinfer_kvtier.segments import parse_segment_name
from deepinfer_kvtier.writer import write_all

if TYPE_CHECKING:
    from deepinfer_kvtier.directory import DirectoryTier

_CHUNK_BYTES = 4 << 20
_MAGIC_WORD = np.frombuffer(fmt.TRAILER_MAGIC, dtype="<u8")[0]


def adopt(directory: DirectoryTier, name: str) -> bool:
    """Finish the log of a dead writer; False when it lives, is ended, or has no folder any more.

    raises: OSError.
    """
    folder = directory.root / "w" / name
    with directory.sharing.take_over(name) as mine:
        if not mine:
            return False
        # A writer on another machine may only have been away: its files are left as they are.
        cut = not directory.sharing.shared
        return _finish_log(folder, directory.store, directory.io, cut=cut)


def _finish_log(folder: Path, store: bytes, io: IoEngine, *, cut: bool) -> bool:
    log = LogReader(folder, store, io)
    try:
        entries = log.poll()
        if log.ended:
            return False
        writer, frames = log.writer, log.frames
    finally:
        log.close()
    files = sorted(io.listdir(folder))
    found = [_scan_tail(folder / file, entries, io, cut=cut) for file in files]
    end = np.zeros(1, dtype=fmt.ENTRY)
    end["flags"] = fmt.FLAG_LOG_END
    # Two batches: the end mark has to be the last entry of the last frame.
    additions = [part for part in found if len(part)]
    try:
        fd = io.open_write(folder / "idx-0.kvx")
    except FileNotFoundError:
        # It died between making its folder and its log.
        fd = io.create(folder / "idx-0.kvx")
    try:
        for batch in (*additions, end):
            for frame in fmt.pack_frames(batch, frames, store, writer):
                write_all(io, fd, [frame], frames * fmt.PAGE)
                frames += 1
        io.datasync(fd)
    finally:
        io.close(fd)
    return True


def _scan_tail(path: Path, entries: NDArray[Any], io: IoEngine, *, cut: bool) -> NDArray[Any]:
    """Entries for the slots behind the last indexed one; with `cut` the rest of the file goes."""
    parsed = parse_segment_name(path.name)
    if parsed is None:
        return _NOTHING
    number = parsed[2]
    known = entries[(entries["segment"] == number) & ((entries["flags"] & fmt.CONTROL_FLAGS) == 0)]
    start = fmt.PAGE
    if len(known):
        last = known[np.argmax(known["page"])]
        start = int(last["page"]) * fmt.PAGE + fmt.slot_bytes(int(last["length"]))
    fd = io.open_write(path) if cut else io.open_read(path)
    try:
        found, end = _scan_slots(fd, start, number, io)
        if cut:
            io.truncate(fd, end)
    finally:
        io.close(fd)
    return np.concatenate(found) if found else _NOTHING


def _scan_slots(fd: int, start: int, number: int, io: IoEngine) -> tuple[list[NDArray[Any]], int]:
    """Walk slots by looking for the trailer that says how long its own slot is."""
    found: list[NDArray[Any]] = []
    slot = at = start
    chunk = bytearray(_CHUNK_BYTES)
    while True:
        got = io.preadv(fd, [chunk], at) // fmt.PAGE * fmt.PAGE
        if got <= 0:
            return found, slot
        words = np.frombuffer(chunk, dtype="<u8", count=got // 8)
        restart = None
        for word in np.flatnonzero(words == _MAGIC_WORD):
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
            found.append(_entry_of(trailer, number, slot))
            slot += fmt.slot_bytes(trailer.payload_bytes)
        if restart is not None and restart > at:
            at = restart
        elif got < len(chunk):
            return found, slot
        else:
            at += got


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
