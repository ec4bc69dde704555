"""Codecs of single parts: zstd, alone or behind a byte shuffle. Needs the extra [zstd]."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_kvtier.buffers import scatter_into
from deepinfer_kvtier.errors import ConfigError

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
            'compression needs the extra "zstd": pip install "deepinfer-kvtier[zstd]"'
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
