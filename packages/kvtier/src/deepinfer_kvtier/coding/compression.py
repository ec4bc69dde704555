"""Compressed records: which codec a part gets, and how the parts lie in one payload.

A compressed payload is a table of its parts and then their stored bytes, end to end. A part that
does not shrink by a sixteenth is stored as it is; a record whose slot would not get shorter is not
compressed at all. Which setting wrote a record does not matter to who reads it.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from deepinfer_kvtier.buffers import part_of, scatter_into
from deepinfer_kvtier.coding import codec as codecs
from deepinfer_kvtier.coding.codec import PLAIN, PLAIN_ID, SHUFFLED_ID, ZSTD_ID, Codec
from deepinfer_kvtier.layout import MAX_PARTS, Part
from deepinfer_kvtier.records import Status
from deepinfer_kvtier.store import format as fmt

logger = logging.getLogger(__name__)

_COUNT = struct.Struct("<HH")  # parts, 0
_PART = struct.Struct("<IIBBH")  # bytes, stored bytes, codec, element width, 0
_LEAST_GAIN: Final = 16  # a part has to lose one of so many bytes
_warned: set[str] = set()
_warn_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Packing:
    """What one kind of record of one namespace is compressed with: size and codec of each part."""

    compressor: Compressor
    parts: tuple[tuple[int, Codec], ...]

    def compress(self, payload: memoryview) -> bytes | None:
        """The stored form of a payload, or None when it had better be stored as it is."""
        return self.compressor.compress(payload, self.parts)


class Compressor:
    """The setting `compression` of one cache, and what it has done. Thread-safe.

    patterns: codec by pattern of part names.
    raises: ConfigError without the library.
    """

    def __init__(self, patterns: Mapping[str, Codec]) -> None:
        codecs.require_library()
        self._patterns = patterns
        self._lock = threading.Lock()
        self._packings: dict[tuple[Part, ...], Packing | None] = {}
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0

    def packing(self, parts: tuple[Part, ...]) -> Packing | None:
        """For records of these parts; None when all of them are stored as they are."""
        if parts not in self._packings:
            chosen = tuple((part.size, self._codec_of(part.name)) for part in parts)
            useful = any(codec is not PLAIN for size, codec in chosen if size)
            self._packings[parts] = Packing(self, chosen) if useful else None
        return self._packings[parts]

    def compress(self, payload: memoryview, parts: Sequence[tuple[int, Codec]]) -> bytes | None:
        """A compressed payload, or None. `parts`: bytes and codec of each, end to end."""
        started = time.perf_counter()
        stored = _pack(payload, parts)
        spent = time.perf_counter() - started
        with self._lock:
            self._counts["records" if stored is not None else "plain_records"] += 1
            self._counts["bytes_before"] += payload.nbytes
            self._counts["bytes_after"] += payload.nbytes if stored is None else len(stored)
            self._seconds += spent
        return stored

    def stats(self) -> dict[str, float]:
        """Records and bytes before and after, and the seconds it took, for `Cache.stats`."""
        with self._lock:
            return {**self._counts, "seconds": self._seconds}

    def _codec_of(self, name: str) -> Codec:
        """Of the patterns that fit, the longest decides: a whole name before "L2.*" before "*"."""
        fitting = [pattern for pattern in self._patterns if fnmatchcase(name, pattern)]
        return self._patterns[max(fitting, key=len)] if fitting else PLAIN


def open_compressor(setting: str | Mapping[str, str]) -> Compressor | None:
    """None for a setting that compresses nothing. raises: ConfigError."""
    patterns = {"*": setting} if isinstance(setting, str) else setting
    chosen = {pattern: codecs.CODECS[name] for pattern, name in patterns.items()}
    if all(codec is PLAIN for codec in chosen.values()):
        return None
    return Compressor(chosen)


def expand(stored: memoryview, views: Sequence[memoryview]) -> Status:
    """Bring a compressed payload back into `views`.

    returns: OK; CORRUPT when the table or a part is not what this destination needs; SKIPPED when
             this process has not got the codec, which is counted by the caller and logged here.
    """
    parts = read_table(stored)
    if parts is None or sum(size for size, _, _ in parts) != sum(view.nbytes for view in views):
        return Status.CORRUPT
    if any(codec.id not in (PLAIN_ID, ZSTD_ID, SHUFFLED_ID) for _, _, codec in parts):
        warn_missing("it uses a codec that this release does not know")
        return Status.SKIPPED
    offset, at = 0, _COUNT.size + _PART.size * len(parts)
    for size, length, codec in parts:
        source, target = stored[at : at + length], part_of(views, offset, size)
        if codec.id == PLAIN_ID:
            if size != length:
                return Status.CORRUPT
            scatter_into(target, source)
        elif not size or codec.width not in (1, 2, 4) or not codecs.decode(source, codec, target):
            return Status.CORRUPT
        offset += size
        at += length
    return Status.OK


def read_table(stored: memoryview) -> list[tuple[int, int, Codec]] | None:
    """(bytes, stored bytes, codec) of each part; None unless they account for every byte."""
    if stored.nbytes < _COUNT.size:
        return None
    count, _ = _COUNT.unpack_from(stored)
    at = _COUNT.size + _PART.size * count
    if not 1 <= count <= MAX_PARTS or stored.nbytes < at:
        return None
    table = list(_PART.iter_unpack(stored[_COUNT.size : at]))
    if at + sum(length for _, length, *_ in table) != stored.nbytes:
        return None
    return [(size, length, Codec(id_, width)) for size, length, id_, width, _ in table]


def warn_missing(why: str) -> None:
    """Say once a process, for each reason, why compressed records are misses here."""
    with _warn_lock:
        if why in _warned:
            return
        _warned.add(why)
    logger.warning("a compressed record cannot be read and counts as a miss: %s", why)


def _pack(payload: memoryview, parts: Sequence[tuple[int, Codec]]) -> bytes | None:
    table = [_COUNT.pack(len(parts), 0)]
    bodies: list[bytes | memoryview] = []
    at = 0
    for size, wanted in parts:
        body: bytes | memoryview = payload[at : at + size]
        codec = wanted if size else PLAIN
        if codec is not PLAIN:
            smaller = codecs.encode(payload[at : at + size], codec)
            if len(smaller) <= size - size / _LEAST_GAIN:
                body = smaller
            else:
                codec = PLAIN
        table.append(_PART.pack(size, len(body), codec.id, codec.width, 0))
        bodies.append(body)
        at += size
    length = sum(map(len, table)) + sum(map(len, bodies))
    if fmt.slot_bytes(length) >= fmt.slot_bytes(payload.nbytes):
        return None
    return b"".join((*table, *bodies))
