"""Which records are worth a place in the directory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 1 << 20
"""Records whose first put is remembered: about 100 MB of host memory when all are in use."""


class PutHistory:
    """Remembers the last `capacity` records that were put once."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._capacity = capacity
        self._once: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._lock = threading.Lock()

    def second_time(self, kind: int, digest: bytes) -> bool:
        """Whether this record was put before; the first time it is remembered."""
        key = (kind, digest[:8])
        with self._lock:
            if key in self._once:
                self._once.move_to_end(key)
                return True
            self._once[key] = None
            if len(self._once) > self._capacity:
                self._once.popitem(last=False)
            return False
