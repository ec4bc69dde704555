"""Loads that wait for a thread, most urgent first, and how a running one lets others pass.

A load asks between two pieces of its work whether a more urgent one waits or runs. If one waits and
no thread is free for it, it is done there and then, in the thread of the less urgent load; if one
runs elsewhere, its end is waited for, so that the storage is its alone. Nobody starves: at most
`MOST_BEFORE_A_PIECE` urgent loads pass between two pieces of another, and every
`PICKS_BY_AGE`th load that starts is the oldest that waits.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
from collections.abc import Callable
from typing import Final

from deepinfer_kvtier.base.errors import ClosedError

MOST_BEFORE_A_PIECE: Final = 4
PICKS_BY_AGE: Final = 8
_DEEPEST: Final = 8  # loads within loads in one thread

_NOBODY: Final = float("-inf")


class LoadTicket:
    """One load that runs: its priority, larger = more urgent, and whom it must let pass."""

    def __init__(self, priority: int, queue: LoadScheduler | None = None, depth: int = 0) -> None:
        self.priority = priority
        self.depth = depth
        self._queue = queue

    @property
    def contested(self) -> bool:
        """Whether a more urgent load waits or runs."""
        return self._queue is not None and self._queue.most_urgent > self.priority

    def give_way(self) -> None:
        """Let more urgent loads pass, if there are any. Call it with no lock held."""
        if self._queue is not None and self._queue.most_urgent > self.priority:
            self._queue.let_pass(self)


_Work = Callable[[LoadTicket], None]
_Entry = tuple[int, int, _Work]
"""Minus the priority, order of arrival, what to do."""


class LoadScheduler:
    """Threads that do loads, started when they are needed."""

    def __init__(self, threads: int) -> None:
        self._max_threads = threads
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._passed = threading.Condition(self._lock)
        self._waiting: list[_Entry] = []  # a heap
        self._running: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._submitted = 0
        self._picked = 0
        self._ended = 0
        self._closing = False
        self.most_urgent: float = _NOBODY

    def submit(self, work: _Work, priority: int) -> None:
        """Do `work` in one of the threads; its own errors are its affair. raises: ClosedError."""
        with self._lock:
            if self._closing:
                raise ClosedError("the cache is closed; open it again")
            heapq.heappush(self._waiting, (-priority, self._submitted, work))
            self._submitted += 1
            self._note()
            if self._idle < len(self._waiting) and len(self._threads) < self._max_threads:
                name = f"kvtier-load-{len(self._threads)}"
                thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._work.notify()

    def begin(self, priority: int) -> None:
        """A load that its caller does itself begins: the less urgent ones here let it pass."""
        with self._lock:
            self._running[priority] = self._running.get(priority, 0) + 1
            if priority > self.most_urgent:
                self.most_urgent = priority

    def end(self, priority: int) -> None:
        """It has ended."""
        with self._lock:
            left = self._running[priority] - 1
            if left:
                self._running[priority] = left
            else:
                del self._running[priority]
                self._note()
            self._ended += 1
            self._passed.notify_all()

    def let_pass(self, urgency: LoadTicket) -> None:
        """Do what is more urgent and has no thread; wait for what has one."""
        if urgency.depth >= _DEEPEST:
            return
        for _ in range(MOST_BEFORE_A_PIECE):
            with self._lock:
                if self.most_urgent <= urgency.priority:
                    return
                if not self._lacks_thread(urgency.priority):
                    self._wait_for_end(urgency.priority)
                    continue
                priority, work = self._take(heapq.heappop(self._waiting))
            self._do(work, LoadTicket(priority, self, urgency.depth + 1))

    def shutdown(self) -> None:
        """Do what waits, then end the threads."""
        with self._lock:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
                self._work.wait_for(lambda: self._waiting or self._closing)
                self._idle -= 1
                if not self._waiting:
                    return
                priority, work = self._pick()
            self._do(work, LoadTicket(priority, self))

    def _do(self, work: _Work, urgency: LoadTicket) -> None:
        try:
            # Who submitted it looks for errors in the result that the work left behind.
            with contextlib.suppress(BaseException):
                work(urgency)
        finally:
            self.end(urgency.priority)

    # -- inside the lock

    def _pick(self) -> tuple[int, _Work]:
        self._picked += 1
        if self._picked % PICKS_BY_AGE:
            return self._take(heapq.heappop(self._waiting))
        oldest = min(self._waiting, key=lambda entry: entry[1])
        self._waiting.remove(oldest)
        heapq.heapify(self._waiting)
        return self._take(oldest)

    def _take(self, entry: _Entry) -> tuple[int, _Work]:
        """Priority and work of what has left the queue and is about to run."""
        negative, _, work = entry
        self._running[-negative] = self._running.get(-negative, 0) + 1
        self._note()
        # Those who wait for a thread to take something else may have to take what is left.
        self._passed.notify_all()
        return -negative, work

    def _lacks_thread(self, priority: int) -> bool:
        """Whether something more urgent waits and no thread is free for it."""
        return bool(self._waiting) and -self._waiting[0][0] > priority and not self._idle

    def _wait_for_end(self, priority: int) -> None:
        """Until some load has ended, or one that waits needs this thread."""
        ended = self._ended
        self._passed.wait_for(lambda: self._ended != ended or self._lacks_thread(priority))

    def _note(self) -> None:
        waiting = -self._waiting[0][0] if self._waiting else _NOBODY
        self.most_urgent = max(waiting, max(self._running, default=_NOBODY))
