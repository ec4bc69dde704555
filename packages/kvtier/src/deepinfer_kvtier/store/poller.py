"""The threads that keep a process in touch with the others on a mounted file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from deepinfer_kvtier.breaker import Breaker
from deepinfer_kvtier.store.mount import MountSettings
from deepinfer_kvtier.store.sharing import Sharing


class Polled(Protocol):
    """What is polled: the directory tier."""

    breaker: Breaker
    sharing: Sharing

    def refresh(self, *, listing: bool = True) -> None: ...


class Poller:
    """Reads the others' logs every `poll_s`, and gives a sign of life every `heartbeat_s`.

    Two threads: a sign of life has to reach the server, and the news do not wait for that.
    """

    def __init__(self, directory: Polled, settings: MountSettings) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.errors = 0
        self._threads = [
            threading.Thread(target=self._run, args=job, name=f"kvtier-{name}", daemon=True)
            for name, *job in (
                ("poll", settings.poll_s, self._poll),
                ("beat", settings.heartbeat_s, directory.sharing.beat),
            )
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop; a call into a hung mount may outlive this."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5.0)

    def _poll(self) -> None:
        if not self._directory.breaker.is_open:
            self._directory.refresh(listing=False)

    def _run(self, every_s: float, work: Callable[[], None]) -> None:
        while not self._stop.wait(every_s):
            try:
                work()
            except OSError:
                self.errors += 1
                self._directory.breaker.error()
