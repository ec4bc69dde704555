"""The thread that keeps a process in touch with the others on a mounted file system."""

from __future__ import annotations

import threading
from typing import Protocol

from deepinfer_kvtier.breaker import Breaker
from deepinfer_kvtier.mount import MountSettings
from deepinfer_kvtier.sharing import Sharing


class Polled(Protocol):
    """What is polled: the directory tier."""

    breaker: Breaker
    sharing: Sharing

    def refresh(self, *, listing: bool = True) -> None: ...


class Poller:
    """Reads the others' logs every `poll_s`, and gives a sign of life every `heartbeat_s`."""

    def __init__(self, directory: Polled, settings: MountSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._stop = threading.Event()
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="kvtier-poll", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop; a call into a hung mount may outlive this."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        rounds = 0
        every = max(1, round(self._settings.heartbeat_s / self._settings.poll_s))
        while not self._stop.wait(self._settings.poll_s):
            rounds += 1
            try:
                if rounds % every == 0:
                    self._directory.sharing.beat()
                if not self._directory.breaker.is_open:
                    self._directory.refresh(listing=False)
            except OSError:
                self.errors += 1
                self._directory.breaker.error()
