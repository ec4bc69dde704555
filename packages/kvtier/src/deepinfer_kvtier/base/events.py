"""Who is told when records come and go."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from deepinfer_kvtier.base.values import KVEvent

Callback = Callable[[KVEvent], None]


class EventHub:
    """Calls subscribers in the thread that made the change, with no lock of the cache held."""

    def __init__(self) -> None:
        self._callbacks: tuple[Callback, ...] = ()
        self._lock = threading.Lock()
        self.failed_callbacks = 0
        self.active = False
        """Whether anybody listens; without listeners events are not even built."""

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Add a listener; returns the call that removes it again."""
        with self._lock:
            self._callbacks = (*self._callbacks, callback)
            self.active = True

        def unsubscribe() -> None:
            with self._lock:
                self._callbacks = tuple(c for c in self._callbacks if c is not callback)
                self.active = bool(self._callbacks)

        return unsubscribe

    def emit(self, events: Iterable[KVEvent]) -> None:
        """A listener that raises is counted and does not disturb the others or the cache."""
        callbacks = self._callbacks
        for event in events:
            for callback in callbacks:
                try:
                    callback(event)
                except Exception:
                    self.failed_callbacks += 1


class EventQueue:
    """Bounded, for `cache.subscribe(queue)`; when full, the oldest event is lost and counted."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._events: deque[KVEvent] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self.lost = 0

    def __call__(self, event: KVEvent) -> None:
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self.lost += 1
            self._events.append(event)

    def drain(self) -> list[KVEvent]:
        """All waiting events, oldest first."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events
