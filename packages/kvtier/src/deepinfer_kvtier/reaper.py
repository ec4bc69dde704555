"""Ends leases in a cache that only looks: it has no writing thread that could do so in passing."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Reaper:
    """Calls `expire` again and again until it is closed."""

    def __init__(self, expire: Callable[[], None], every_s: float) -> None:
        self._expire = expire
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-leases", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._expire()
