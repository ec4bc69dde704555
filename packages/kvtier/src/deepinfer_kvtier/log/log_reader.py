"""Finding records in segment files without any index, by their trailers."""

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

from deepinfer_kvtier.base.files import IoEngine, read_fully, write_all
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.segments import parse_segment_name

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


_CHUNK_FRAMES = 256


class LogReader:
    """Reads the frames that were added since the last `poll`; never trusts the size of the file.

    The first poll of a log of more than a few frames begins with the newest good snapshot. So does
    one that finds the frames it needs given back to the file system; without a good snapshot the
    segments themselves are read.
    """

    def __init__(self, folder: Path, store: bytes, io: IoEngine) -> None:
        self.folder = folder
        self.writer = bytes.fromhex(folder.name)
        self.ended = False
        self.bad_frames = 0
        self.bad_snapshots = 0
        self.rescans = 0
        self.frames = 0
        self.snapshot: Snapshot | None = None
        self._store = store
        self._io = io
        self._fd: int | None = None

    def poll(self) -> NDArray[Any]:
        """New entries in order; empty when there are none, the log is gone, or it has ended.

        raises: OSError other than "the file is gone"; the next poll opens the log by its path.
        """
        try:
            return self._poll()
        except OSError:
            self.close()
            raise

    def _poll(self) -> NDArray[Any]:
        if self.ended:
            return _NOTHING
        if self._fd is None:
            try:
                self._fd = self._io.open_read(self.folder / "idx-0.kvx")
            except FileNotFoundError:
                return _NOTHING
        found: list[NDArray[Any]] = []
        while True:
            raw, frames = self._read_chunk(self._fd)
            if self.frames == 0 and frames == _CHUNK_FRAMES:
                shortcut = self._from_snapshot()
                if shortcut:
                    found.extend(shortcut)
                    continue
            if frames and not any(raw[: fmt.PAGE]):
                substitute = self._over_hole(self._fd)
                if substitute is None:
                    break
                found.extend(substitute)
                continue
            fresh = self._parse(raw, frames)
            found.extend(fresh)
            if frames < _CHUNK_FRAMES or not fresh:
                break
        entries = np.concatenate(found) if found else _NOTHING
        # The end mark is the last entry of a log, and of a snapshot of an ended one.
        if len(entries) and entries["flags"][-1] & fmt.FLAG_LOG_END:
            self.ended = True
            self.close()
        return entries

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            self._io.close(self._fd)
            self._fd = None

    def _from_snapshot(self) -> list[NDArray[Any]]:
        """Entries of the newest snapshot that reaches further than this reader."""
        snapshot, damaged = read_newest(
            self.folder, self._store, self.writer, self._io, beyond=self.frames
        )
        self.bad_snapshots = max(self.bad_snapshots, damaged)
        if snapshot is None:
            return []
        self.snapshot = snapshot
        self.frames = snapshot.next_frame
        return [snapshot.entries]

    def _over_hole(self, fd: int) -> list[NDArray[Any]] | None:
        """What stands in for frames that are gone; None at the end of the log."""
        end = self._end_of_hole(fd)
        if end is None:
            return None
        found = self._from_snapshot()
        if not found:
            self.rescans += 1
            found = [scan_folder(self.folder, self._io)]
            self.frames = end
        return found

    def _end_of_hole(self, fd: int) -> int | None:
        """Number of the first good frame behind the missing ones."""
        at = self.frames
        while True:
            chunk = bytearray(_CHUNK_FRAMES * fmt.PAGE)
            frames = self._io.preadv(fd, [chunk], at * fmt.PAGE) // fmt.PAGE
            for i in range(frames):
                frame = memoryview(chunk)[i * fmt.PAGE : (i + 1) * fmt.PAGE]
                if fmt.parse_frame(frame, at + i, self._store, self.writer) is not None:
                    return at + i
            if frames < _CHUNK_FRAMES:
                return None
            at += frames

    def _read_chunk(self, fd: int) -> tuple[memoryview, int]:
        chunk = bytearray(_CHUNK_FRAMES * fmt.PAGE)
        got = self._io.preadv(fd, [chunk], self.frames * fmt.PAGE)
        return memoryview(chunk), got // fmt.PAGE

    def _parse(self, raw: memoryview, frames: int) -> list[NDArray[Any]]:
        """Good frames from the front; a bad one is skipped only when a good one follows it.

        The last frame may be half written: then the next poll reads it again.
        """
        good: list[NDArray[Any]] = []
        bad_run = 0
        start = self.frames
        for i in range(frames):
            frame = raw[i * fmt.PAGE : (i + 1) * fmt.PAGE]
            entries = fmt.parse_frame(frame, start + i, self._store, self.writer)
            if entries is None:
                bad_run += 1
                continue
            self.bad_frames += bad_run
            bad_run = 0
            self.frames = start + i + 1
            good.append(entries)
        return good
