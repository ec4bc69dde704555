"""Write-behind for one slow tier: records are copied, wait to fill a batch, and go in one call.

One thread owns the writes and the upkeep of the tier, so that neither the caller nor the writing
thread of the local directory ever waits for a network.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from deepinfer_kvtier.records import Status
from deepinfer_kvtier.writer import Outgoing

MAX_ATTEMPTS = 3
RETRY_S = 1.0


class WriteBehind:
    """Queue and thread in front of `store(batch) -> statuses`.

    upkeep:  called about every `upkeep_s` in the thread; what it raises is counted, not lost.
    """

    def __init__(
        self,
        store: Callable[[Sequence[Outgoing]], list[Status]],
        *,
        batch_bytes: int,
        linger_s: float,
        queue_bytes: int,
        upkeep: Callable[[], None],
        upkeep_s: float,
        name: str,
    ) -> None:
        self._store = store
        self._batch_bytes = batch_bytes
        self._linger_s = linger_s
        self._queue_bytes = queue_bytes
        self._upkeep = upkeep
        self._upkeep_s = upkeep_s
        self._cond = threading.Condition()
        self._waiting: list[tuple[Outgoing, int]] = []
        self._keys: set[tuple[int, bytes]] = set()
        self._bytes = 0
        self._oldest = 0.0
        self._writing = 0
        self._flushing = 0
        self._closing = False
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)
        self._thread.start()

    def add(self, batch: Sequence[Outgoing]) -> list[Status]:
        """Copy records into the queue: OK for those taken, FULL for those that found no room."""
        statuses: list[Status] = []
        with self._cond:
            for record in batch:
                key = record.kind, record.digest
                if key in self._keys:
                    statuses.append(Status.OK)
                elif self._closing or self._bytes + record.nbytes > self._queue_bytes:
                    self.counts["queue_full"] += 1
                    statuses.append(Status.FULL)
                else:
                    self._take(record)
                    statuses.append(Status.OK)
            self._cond.notify_all()
        return statuses

    def discard(self, kind: int, digests: Sequence[bytes]) -> None:
        """Do not write these records any more if they are still waiting."""
        doomed = set(digests)
        with self._cond:
            for record, _ in self._waiting:
                if record.kind == kind and record.digest in doomed:
                    record.dropped = True

    def flush(self, timeout: float) -> int:
        """Write what waits now; returns how many records are still waiting after `timeout`."""
        deadline = time.monotonic() + timeout
        with self._cond:
            self._flushing += 1
            self._cond.notify_all()
            try:
                self._cond.wait_for(
                    lambda: not (self._waiting or self._writing) or not self._thread.is_alive(),
                    max(0.0, deadline - time.monotonic()),
                )
            finally:
                self._flushing -= 1
            return len(self._waiting) + self._writing

    def close(self, timeout: float) -> int:
        """Flush and stop; returns how many records were given up."""
        left = self.flush(timeout)
        with self._cond:
            self._closing = True
            self._cond.notify_all()
        self._thread.join(timeout)
        return left

    @property
    def queued_bytes(self) -> int:
        """Payload bytes that wait or are being written."""
        return self._bytes

    def _take(self, record: Outgoing) -> None:
        whole = bytearray(record.nbytes)
        at = 0
        for view in record.views:
            whole[at : at + view.nbytes] = view
            at += view.nbytes
        if not self._waiting:
            self._oldest = time.monotonic()
        self._waiting.append((replace(record, views=[memoryview(whole)]), 0))
        self._keys.add((record.kind, record.digest))
        self._bytes += record.nbytes

    def _run(self) -> None:
        next_upkeep = 0.0
        while True:
            with self._cond:
                while not (self._closing or self._due() or time.monotonic() >= next_upkeep):
                    self._cond.wait(self._pause(next_upkeep))
                if self._closing:
                    return
                batch = self._next_batch() if self._due() else []
            if batch:
                self._write(batch)
            if time.monotonic() >= next_upkeep:
                try:
                    self._upkeep()
                except Exception:
                    # The network is not there now: the next round tries again.
                    self.counts["upkeep_errors"] += 1
                next_upkeep = time.monotonic() + self._upkeep_s

    def _due(self) -> bool:
        if not self._waiting:
            return False
        full = self._bytes >= self._batch_bytes
        return full or bool(self._flushing) or time.monotonic() >= self._oldest + self._linger_s

    def _pause(self, next_upkeep: float) -> float:
        until = next_upkeep
        if self._waiting:
            until = min(until, self._oldest + self._linger_s)
        return max(0.0, until - time.monotonic())

    def _next_batch(self) -> list[tuple[Outgoing, int]]:
        size = count = 0
        for record, _ in self._waiting:
            if count and size + record.nbytes > self._batch_bytes:
                break
            size += record.nbytes
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        self._writing = len(batch)
        return batch

    def _write(self, batch: list[tuple[Outgoing, int]]) -> None:
        statuses = [Status.ERROR] * len(batch)
        try:
            statuses = self._store([record for record, _ in batch])
        except Exception:
            self.counts["store_errors"] += 1
        again: list[tuple[Outgoing, int]] = []
        with self._cond:
            for (record, attempts), status in zip(batch, statuses, strict=True):
                if status is not Status.OK and attempts + 1 < MAX_ATTEMPTS and not record.dropped:
                    again.append((record, attempts + 1))
                    continue
                if status is not Status.OK:
                    self.counts["failed_records"] += 1
                self._keys.discard((record.kind, record.digest))
                self._bytes -= record.nbytes
            self._waiting[:0] = again
            if self._waiting:
                self._oldest = time.monotonic()
            self._writing = 0
            self._cond.notify_all()
            if again and not self._closing:
                self._cond.wait_for(lambda: self._closing, RETRY_S)
