"""Names of the blocks of a prompt, by which router and workers speak of what is cached where.

h[i] = blake2b-64(h[i-1], tokens of block i, pictures in it), h[-1] over layout and salt. Workers
tell them to routers and to nobody else; what is stored has identities of its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer_engine.core.pictures import Picture, overlapping

HASH_BYTES = 8
CacheTier = Literal["memory", "below"]


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks that came to a tier of a worker's cache, or left it. `below`: disk and what is shared
    with other workers."""

    stored: bool
    tier: CacheTier
    blocks: tuple[int, ...]


def block_hashes(
    tokens: Sequence[int],
    salt: str,
    block_tokens: int,
    layout_hash: str,
    pictures: Sequence[Picture] = (),
) -> list[int]:
    """One number below 2**64 for each whole block of the prompt."""
    count = len(tokens) // block_tokens
    data = array("i", tokens[: count * block_tokens]).tobytes()
    step = 4 * block_tokens
    name = hashlib.blake2b(f"{layout_hash}/{salt}".encode(), digest_size=HASH_BYTES).digest()
    found: list[int] = []
    for i in range(count):
        block = hashlib.blake2b(data[i * step : (i + 1) * step], digest_size=HASH_BYTES, key=name)
        if pictures:
            for picture in overlapping(pictures, i * block_tokens, (i + 1) * block_tokens):
                block.update(picture.digest + picture.start.to_bytes(8))
        name = block.digest()
        found.append(int.from_bytes(name, "little"))
    return found


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Raw little-endian uint64."""
    return b"".join(one.to_bytes(HASH_BYTES, "little") for one in hashes)


def unpack_hashes(data: bytes) -> tuple[int, ...]:
    """Raises ValueError for a length that is no multiple of 8."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes of block hashes")
    return tuple(
        int.from_bytes(data[i : i + HASH_BYTES], "little") for i in range(0, len(data), HASH_BYTES)
    )
