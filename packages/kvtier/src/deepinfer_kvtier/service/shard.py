"""What one directory process remembers: bounded, forgetful, and never asked to be right."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from deepinfer_kvtier.clock import Clock

_EXPIRY = struct.Struct("<d")


class ShardMap:
    """Values by key with an expiry; the oldest publications go first when it is full."""

    def __init__(self, max_entries: int, clock: Clock) -> None:
        self.max_entries = max_entries
        self._clock = clock
        # Expiry and value as one object: a tuple and a float would cost half as much again.
        self._items: dict[bytes, bytes] = {}
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._items)

    def lookup(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in order; None for what is unknown or expired."""
        now = self._clock.monotonic()
        found: list[bytes | None] = []
        for key in keys:
            item = self._items.get(key)
            if item is not None and _EXPIRY.unpack_from(item)[0] <= now:
                del self._items[key]
                item = None
            found.append(None if item is None else item[_EXPIRY.size :])
        return found

    def publish(self, items: Sequence[tuple[bytes, bytes]], ttl_s: float) -> None:
        """Remember values; the latest publication of a key wins."""
        until = _EXPIRY.pack(self._clock.monotonic() + ttl_s)
        for key, value in items:
            self._items.pop(key, None)
            self._items[key] = until + value
        while len(self._items) > self.max_entries:
            del self._items[next(iter(self._items))]
            self.evicted += 1

    def retract(self, keys: Sequence[bytes]) -> None:
        """Forget keys."""
        for key in keys:
            self._items.pop(key, None)
