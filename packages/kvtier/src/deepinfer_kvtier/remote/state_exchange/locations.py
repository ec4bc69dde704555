"""Who holds which window: the interface, and the table in this process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from deepinfer_kvtier.base.timing import Clock, SystemClock
from deepinfer_kvtier.remote.state_exchange.wire import WindowRecord

MAX_RECORDS = 1 << 20


@runtime_checkable
class WindowLocations(Protocol):
    """Hints by key. Every call may fail: the exchange then does without."""

    def publish(self, records: Sequence[WindowRecord]) -> None:
        """Add or replace; called from a background thread. raises: OSError."""
        ...

    def withdraw(self, keys: Sequence[bytes], machine: bytes) -> None:
        """Forget what this machine no longer holds; records of others stay. raises: OSError."""
        ...

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> list[WindowRecord | None]:
        """A record for each key (16 bytes) or None, within the time; late answers are misses."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...


class LocalLocations:
    """A bounded table in memory; also what each member of a `PeerLocations` keeps.

    The entry that expires first is not searched for: past `capacity` the oldest publication goes.
    """

    def __init__(self, *, capacity: int = MAX_RECORDS, clock: Clock | None = None) -> None:
        self._capacity = capacity
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, tuple[float, WindowRecord]] = OrderedDict()

    def publish(self, records: Sequence[WindowRecord]) -> None:
        now = self._clock.monotonic()
        with self._lock:
            for record in records:
                self._records[record.key] = (now + record.ttl_ms / 1000, record)
                self._records.move_to_end(record.key)
            while len(self._records) > self._capacity:
                self._records.popitem(last=False)

    def withdraw(self, keys: Sequence[bytes], machine: bytes) -> None:
        with self._lock:
            for key in keys:
                found = self._records.get(key)
                if found is not None and found[1].machine == machine:
                    del self._records[key]

    def lookup(self, keys: Sequence[bytes], timeout_s: float = 0.0) -> list[WindowRecord | None]:
        now = self._clock.monotonic()
        answer: list[WindowRecord | None] = []
        with self._lock:
            for key in keys:
                found = self._records.get(key)
                if found is not None and found[0] <= now:
                    del self._records[key]
                    found = None
                answer.append(
                    None
                    if found is None
                    else replace(found[1], ttl_ms=int(1000 * (found[0] - now)))
                )
        return answer

    def __len__(self) -> int:
        return len(self._records)

    def close(self) -> None:
        """Nothing is held open."""
