"""Reads and writes that bypass the page cache (O_DIRECT).

For disks whose cache is of no use: the store is many times larger than memory, and what the cache
holds host memory holds already. Every transfer has an aligned copy of its own in exchange.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from deepinfer_kvtier.io import Readable
from deepinfer_kvtier.store.format import PAGE
from deepinfer_kvtier.store.staged import StagedIo

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 1 << 20
"""Of each thread that reads or writes."""


class DirectIo(StagedIo):
    """`IoEngine` with O_DIRECT for segments; without it, and saying so, where it is refused."""

    granule = PAGE

    def __init__(self) -> None:
        super().__init__()
        self._memory = threading.local()
        self._reason = ""
        self._fallbacks = 0

    def facts(self) -> Mapping[str, str | int]:
        """fallbacks: opens of segments that had to do without; reason: why the first of them."""
        return {"engine": "odirect", "fallbacks": self._fallbacks, "reason": self._reason}

    def _open_segment(self, path: Path, flags: int) -> tuple[int, bool]:
        flags |= os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
        # Some file systems create the file before they refuse.
        fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        self._fall_back(f"the file system of {path.parent} refuses O_DIRECT")
        return fd, False

    def _staging(self) -> memoryview:
        room: memoryview | None = getattr(self._memory, "room", None)
        if room is None:
            room = self._memory.room = memoryview(mmap.mmap(-1, STAGING_BYTES))
        return room

    def _read(self, fd: int, room: memoryview, offset: int) -> int:
        try:
            return os.preadv(fd, [room], offset)
        except OSError as cause:
            self._demote(fd, cause)
            return os.preadv(fd, [room], offset)

    def _write(self, fd: int, span: memoryview, offset: int) -> int:
        try:
            return os.pwrite(fd, span, offset)
        except OSError as cause:
            self._demote(fd, cause)
            return os.pwrite(fd, span, offset)

    def _write_plainly(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        if fd not in self._segments:
            return super()._write_plainly(fd, buffers, offset)
        # Through the page cache, by a descriptor of its own: others use this one meanwhile.
        plain = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            return os.pwritev(plain, buffers, offset)
        finally:
            os.close(plain)

    def _demote(self, fd: int, cause: OSError) -> None:
        """What was opened with O_DIRECT may still refuse transfers: go on without. raises."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if cause.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise cause
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._fall_back(f"direct transfers of {PAGE} bytes are refused ({cause.strerror})")

    def _fall_back(self, reason: str) -> None:
        with self._lock:
            self._fallbacks += 1
            first, self._reason = not self._reason, self._reason or reason
        if first:
            logger.warning("%s: reads and writes go through the page cache", reason)
