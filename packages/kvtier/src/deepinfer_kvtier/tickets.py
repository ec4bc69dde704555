"""What a caller holds while its records travel: a ticket for puts, a job for loads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Literal, overload

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.loads.stages import Arrivals
from deepinfer_kvtier.records import LoadResult, Status

Durability = Literal["behind", "flushed", "fsync"]


class PutTicket:
    """Follows one `put`.

    accepted: for each record, whether the cache took it.
    reasons:  for each record, None or why not: "queue_full", "unconfirmed", "read_only",
              "disk_full", "no_room", "class_pressure", "duplicate_in_call", "not_persistent". A
              record refused for the directory may still have been kept in host memory. An accepted
              one that was not stored because its source had changed says "source_changed".
    """

    def __init__(self, reasons: Sequence[str | None]) -> None:
        self.reasons: tuple[str | None, ...] = tuple(reasons)
        self.accepted: tuple[bool, ...] = tuple(reason is None for reason in reasons)
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._waiting = 0
        self._closed = False
        self._stored = [False] * len(reasons)
        self._source: object = None
        self.future: Future[PutTicket] = Future()

    @property
    def done(self) -> bool:
        """No accepted record is still on its way to the promised durability."""
        return self._event.is_set()

    @property
    def stored(self) -> tuple[bool, ...]:
        """For each record, whether it has reached the promised durability."""
        with self._lock:
            return tuple(self._stored)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until done; returns whether every accepted record was stored in time."""
        if not self._event.wait(timeout):
            return False
        return self.stored == self.accepted

    def keep_alive(self, source: object) -> None:
        """Hold the caller's buffers until the ticket is done."""
        with self._lock:
            if not self._event.is_set():
                self._source = source

    def expect(self, count: int = 1) -> None:
        """So many more records whose fate will be reported."""
        with self._lock:
            self._waiting += count

    def report(self, fates: Sequence[tuple[int, bool]]) -> None:
        """Which of the records that were expected are stored, and which never will be."""
        with self._lock:
            for index, stored in fates:
                self._stored[index] = stored
            self._waiting -= len(fates)
        self._settle()

    def note(self, index: int, reason: str) -> None:
        """Why an accepted record will not be stored."""
        with self._lock:
            self.reasons = (*self.reasons[:index], reason, *self.reasons[index + 1 :])

    def refuse(self, index: int, reason: str) -> None:
        """A record that could not be taken after all."""
        with self._lock:
            self.reasons = (*self.reasons[:index], reason, *self.reasons[index + 1 :])
            self.accepted = (*self.accepted[:index], False, *self.accepted[index + 1 :])

    def stored_now(self, indices: Iterable[int]) -> None:
        """Records that are there already."""
        with self._lock:
            for index in indices:
                self._stored[index] = True

    def all_expected(self) -> None:
        """No more `expect` follows."""
        self._closed = True
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            if self._waiting or not self._closed or self._event.is_set():
                return
            self._event.set()
            self._source = None
        self.future.set_result(self)


class LoadJob:
    """Follows one `load`; the destination belongs to the job until it is done."""

    def __init__(self, blocks: int, destinations: object) -> None:
        # Views made from bare addresses keep nothing alive; the job does.
        self._destinations = destinations
        self.statuses: list[Status | None] = [None] * blocks
        self.arrivals: Arrivals | None = None
        self.future: Future[LoadResult] = Future()

    @property
    def done(self) -> bool:
        """The load has ended, well or not."""
        return self.future.done()

    def ready(self, what: int | str) -> bool:
        """Whether a block of the requested range is there, or, by name or pattern, a part of every
        block: bytes and checksum.

        Parts are known to loads that were given `parts`. raises: ConfigError for an unknown part.
        """
        if isinstance(what, int):
            return self.statuses[what] is Status.OK
        return self._known_parts().ready(what)

    def wait_ready(self, part: str, timeout: float | None = None) -> bool:
        """Wait until `ready(part)`; False when the load ends without it or the time is over."""
        return self._known_parts().wait(part, timeout)

    def _known_parts(self) -> Arrivals:
        if self.arrivals is None:
            raise ConfigError("this load has no parts to wait for: pass parts to load")
        return self.arrivals

    @property
    def result(self) -> LoadResult | None:
        """The result, or None while the load runs."""
        return self.future.result() if self.future.done() else None

    @overload
    def wait(self) -> LoadResult: ...

    @overload
    def wait(self, timeout: float) -> LoadResult | None: ...

    def wait(self, timeout: float | None = None) -> LoadResult | None:
        """Wait for the end; None when it has not come after `timeout` seconds."""
        try:
            return self.future.result(timeout)
        except TimeoutError:
            return None
