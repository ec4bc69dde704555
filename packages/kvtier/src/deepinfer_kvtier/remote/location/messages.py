"""Bodies of location frames: keys of 18 bytes, values of at most 64.

A key is the 16-byte address of a record, its kind and its shard. A value is opaque to the service.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from deepinfer_kvtier.remote.location.wire import WireError

KEY_BYTES: Final = 18
MAX_VALUE_BYTES: Final = 64
MAX_KEYS: Final = 4096

_COUNT = struct.Struct("<H")
_PUBLISH = struct.Struct("<IH")


def key_of(digest: bytes, kind: int, shard: int) -> bytes:
    """Directory key of a record."""
    return digest[:16] + bytes((kind, shard))


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Body of a lookup or retraction."""
    return _COUNT.pack(len(keys)) + b"".join(keys)


def parse_keys(body: memoryview) -> list[bytes]:
    """raises: WireError."""
    if len(body) < _COUNT.size:
        raise WireError("a list of keys is cut short")
    (count,) = _COUNT.unpack_from(body)
    if count > MAX_KEYS or len(body) != _COUNT.size + count * KEY_BYTES:
        raise WireError(f"{count} keys were announced in {len(body)} bytes")
    raw = bytes(body[_COUNT.size :])
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def pack_values(values: Sequence[bytes | None]) -> bytes:
    """Body of an answer to a lookup; None travels as an empty value."""
    return b"".join(bytes((len(value or b""),)) + (value or b"") for value in values)


def parse_values(body: memoryview, count: int) -> list[bytes | None]:
    """raises: WireError."""
    values: list[bytes | None] = []
    at = 0
    for _ in range(count):
        if at >= len(body) or at + 1 + body[at] > len(body) or body[at] > MAX_VALUE_BYTES:
            raise WireError("an answer is cut short")
        end = at + 1 + body[at]
        values.append(bytes(body[at + 1 : end]) or None)
        at = end
    if at != len(body):
        raise WireError("an answer is longer than its values")
    return values


def pack_items(items: Sequence[tuple[bytes, bytes]], ttl_s: int) -> bytes:
    """Body of a publication."""
    return _PUBLISH.pack(ttl_s, len(items)) + b"".join(
        key + bytes((len(value),)) + value for key, value in items
    )


def parse_items(body: memoryview) -> tuple[list[tuple[bytes, bytes]], int]:
    """(items, seconds to live). raises: WireError."""
    if len(body) < _PUBLISH.size:
        raise WireError("a publication is cut short")
    ttl_s, count = _PUBLISH.unpack_from(body)
    if count > MAX_KEYS:
        raise WireError(f"at most {MAX_KEYS} keys a frame, got {count}")
    items: list[tuple[bytes, bytes]] = []
    at = _PUBLISH.size
    for _ in range(count):
        head = at + KEY_BYTES
        if head >= len(body) or not 0 < body[head] <= MAX_VALUE_BYTES:
            raise WireError("a publication is cut short")
        end = head + 1 + body[head]
        if end > len(body):
            raise WireError("a publication is cut short")
        items.append((bytes(body[at:head]), bytes(body[head + 1 : end])))
        at = end
    if at != len(body):
        raise WireError("a publication is longer than its items")
    return items, ttl_s
