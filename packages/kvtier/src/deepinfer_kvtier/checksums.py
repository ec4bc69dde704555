"""The checksum that every record carries: xxh3_128."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash


def checksum_of(views: Sequence[Any]) -> bytes:
    """xxh3_128 over byte views, in order."""
    if len(views) == 1:
        return xxhash.xxh3_128_digest(views[0])
    hasher = xxhash.xxh3_128()
    for view in views:
        hasher.update(view)
    return hasher.digest()
