"""Codecs of single parts: zstd, alone or behind a byte shuffle. Needs the extra [zstd]."""

from __future__ import annotations

import importlib
import logging
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.base.buffers import checksum_of, part_of, scatter_into
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.values import MAX_PARTS, Part, Status
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log.reading import Wanted, check_packed

if TYPE_CHECKING:
    import zstandard


PLAIN_ID: Final = 0
ZSTD_ID: Final = 1
SHUFFLED_ID: Final = 2
_MAX_WINDOW: Final = 8 << 20  # memory that a frame may ask for besides its destination


class Codec(NamedTuple):
    """How the bytes of a part are stored; `width`: bytes of an element, for the shuffle."""

    id: int
    width: int


PLAIN: Final = Codec(PLAIN_ID, 1)
CODECS: Final[Mapping[str, Codec]] = {
    "none": PLAIN,
    "zstd-1": Codec(ZSTD_ID, 1),
    "shuffle+zstd-1": Codec(SHUFFLED_ID, 2),
    "shuffle4+zstd-1": Codec(SHUFFLED_ID, 4),
}


@cache
def installed() -> bool:
    """Whether the library behind the codecs is there."""
    try:
        importlib.import_module("zstandard")
    except ImportError:
        return False
    return True


def require_library() -> None:
    """raises: ConfigError without the library."""
    if not installed():
        raise ConfigError(
            'compression needs the extra "zstd": pip install "./packages/kvtier[zstd]"'
        )


def encode(raw: memoryview, codec: Codec) -> bytes:
    """The bytes of one part as a zstd frame that names its content size."""
    if codec.id == SHUFFLED_ID:
        return _contexts().compressor.compress(_shuffled(raw, codec.width).data)
    return _contexts().compressor.compress(raw)


def decode(stored: memoryview, codec: Codec, views: Sequence[memoryview]) -> bool:
    """Bring one part back into `views`; False unless the frame has exactly their bytes.

    Nothing is allocated on the word of the frame: it is read into memory that is there already.
    """
    if codec.id == ZSTD_ID:
        return _inflate(stored, views)
    room: NDArray[np.uint8] = np.empty(sum(view.nbytes for view in views), dtype=np.uint8)
    if not _inflate(stored, [room.data]):
        return False
    if len(views) == 1:
        _unshuffle(room, codec.width, np.frombuffer(views[0], dtype=np.uint8))
        return True
    whole = np.empty_like(room)
    _unshuffle(room, codec.width, whole)
    scatter_into(views, whole.data)
    return True


def _inflate(stored: memoryview, views: Sequence[memoryview]) -> bool:
    import zstandard

    try:
        if zstandard.frame_content_size(stored) != sum(view.nbytes for view in views):
            return False
        with _contexts().decompressor.stream_reader(stored) as frame:
            for view in views:
                at = 0
                while at < view.nbytes:
                    got = frame.readinto(view[at:])
                    if not got:
                        return False
                    at += got
            return True
    except zstandard.ZstdError:
        return False


class _Contexts(threading.local):
    """Memory of the library, which no two threads may share."""

    def __init__(self) -> None:
        import zstandard

        self.compressor: zstandard.ZstdCompressor = zstandard.ZstdCompressor(level=1)
        self.decompressor: zstandard.ZstdDecompressor = zstandard.ZstdDecompressor(
            max_window_size=_MAX_WINDOW
        )


@cache
def _contexts() -> _Contexts:
    return _Contexts()


def _shuffled(raw: memoryview, width: int) -> NDArray[np.uint8]:
    """First bytes of all elements, then the second ones, ...; a rest that is no element last."""
    whole = raw.nbytes // width * width
    flat: NDArray[np.uint8] = np.frombuffer(raw, dtype=np.uint8)
    planes = flat[:whole].reshape(-1, width).T
    return np.concatenate((planes.reshape(-1), flat[whole:]))


def _unshuffle(planes: NDArray[np.uint8], width: int, target: NDArray[np.uint8]) -> None:
    whole = target.nbytes // width * width
    columns = planes[:whole].reshape(width, -1)
    # By shifts, not by a transposed copy, which takes fifteen times as long.
    elements: NDArray[Any] = target[:whole].view(f"<u{width}")
    elements[:] = columns[width - 1]
    for column in reversed(range(width - 1)):
        elements <<= 8
        elements |= columns[column]
    target[whole:] = planes[whole:]


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
        require_library()
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
    chosen = {pattern: CODECS[name] for pattern, name in patterns.items()}
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
        elif not size or codec.width not in (1, 2, 4) or not decode(source, codec, target):
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
            smaller = encode(payload[at : at + size], codec)
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


def open_compressed(
    stored: memoryview,
    trailer: fmt.Trailer | None,
    want: Wanted,
    kind: int,
    shard: int,
    counts: Counter[str],
) -> Status:
    """Verify one compressed record and expand it, or leave it in `want.packed` for its key.

    returns: SKIPPED for a good record that this process cannot expand.
    """
    status = check_packed(stored, trailer, want, kind, shard, counts)
    if status is Status.OK and not installed():
        want.packed = None
        status = _missing(counts)
    elif status is Status.OK and not want.seal:
        want.packed = None
        status = expand_into(want, stored, counts)
    elif want.packed is not None:
        want.packed = memoryview(bytearray(stored))
    return status


def expand_into(want: Wanted, stored: memoryview, counts: Counter[str]) -> Status:
    """Expand verified bytes in the clear into their destination, and sum what arrived there.

    returns: SKIPPED where this process has not got the codec.
    """
    if not installed():
        return _missing(counts)
    started = time.perf_counter()
    status = expand(stored, want.views)
    if status is Status.OK:
        want.checksum = checksum_of(want.views)
        counts["expanded_records"] += 1
        counts["expanded_bytes"] += want.nbytes
        counts["expand_us"] += int((time.perf_counter() - started) * 1e6)
    else:
        counts["corrupt" if status is Status.CORRUPT else "codec_missing"] += 1
    return status


def _missing(counts: Counter[str]) -> Status:
    counts["codec_missing"] += 1
    warn_missing('pip install "./packages/kvtier[zstd]"')
    return Status.SKIPPED
