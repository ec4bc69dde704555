"""Segment files by way of staging memory: for engines that cannot move bytes to any address.

Only segments take this way. Logs, marks of life and the rest are small, unaligned and few.
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
from typing import Any, Final

from deepinfer_kvtier.base.config import IoName
from deepinfer_kvtier.base.files import PRIVATE, IoEngine, Permissions, PosixIo, Readable
from deepinfer_kvtier.log.format import PAGE

SEGMENT_SUFFIX: Final = ".kvs"


class StagedIo(PosixIo):
    """`PosixIo` whose segment files are read and written in pieces through `_staging`.

    granule: offsets and lengths of a transfer are multiples of this; reads take the granules
             around what is wanted, writes have to fit them (all but repairs do).
    """

    granule = 1

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: set[int] = set()

    def close(self, fd: int) -> None:
        if fd in self._segments:
            with self._lock:
                self._segments.discard(fd)
            self._leave(fd)
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        if fd not in self._segments:
            return super().preadv(fd, buffers, offset)
        targets = _Cursor(buffers)
        done = 0
        while done < targets.nbytes:
            at = offset + done
            lead = at % self.granule
            room = self._staging()
            span = min(len(room), _up(lead + targets.nbytes - done, self.granule))
            got = self._read(fd, room[:span], at - lead)
            useful = min(got - lead, targets.nbytes - done)
            if useful <= 0:
                break
            targets.put(room[lead : lead + useful])
            done += useful
            if got < span:
                break
        return done

    def pwritev(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        total = sum([len(buffer) for buffer in buffers])
        if fd not in self._segments or offset % self.granule or total % self.granule:
            return self._write_plainly(fd, buffers, offset)
        sources = _Cursor(buffers)
        done = 0
        while done < total:
            room = self._staging()
            span = min(len(room), total - done)
            sources.take(room[:span])
            written = self._write(fd, room[:span], offset + done)
            done += max(written, 0)
            if written < span:
                break
        return done

    def _open(self, path: Path, flags: int) -> int:
        if path.suffix != SEGMENT_SUFFIX:
            return super()._open(path, flags)
        fd, staged = self._open_segment(path, flags)
        if staged:
            with self._lock:
                self._segments.add(fd)
        return fd

    # -- what an engine is made of

    def _open_segment(self, path: Path, flags: int) -> tuple[int, bool]:
        """Descriptor, and whether its bytes go through staging memory."""
        raise NotImplementedError

    def _leave(self, fd: int) -> None:
        """A segment is about to be closed."""

    def _staging(self) -> memoryview:
        """Memory of this thread, some granules long."""
        raise NotImplementedError

    def _read(self, fd: int, room: memoryview, offset: int) -> int:
        """Fill staging memory; how many bytes there were. raises: OSError."""
        raise NotImplementedError

    def _write(self, fd: int, span: memoryview, offset: int) -> int:
        """Write staging memory; how many bytes were taken. raises: OSError."""
        raise NotImplementedError

    def _write_plainly(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        return super().pwritev(fd, buffers, offset)


class _Cursor:
    """A list of buffers as one sequence of bytes that is passed once."""

    def __init__(self, buffers: Sequence[Any]) -> None:
        self._views = [memoryview(buffer) for buffer in buffers]
        self.nbytes = sum([view.nbytes for view in self._views])
        self._number = 0
        self._at = 0

    def put(self, source: memoryview) -> None:
        """The next bytes become those of `source`."""
        for view, start, end in self._next(len(source)):
            view[:] = source[start:end]

    def take(self, target: memoryview) -> None:
        """`target` becomes the next bytes."""
        for view, start, end in self._next(len(target)):
            target[start:end] = view

    def _next(self, count: int) -> list[tuple[memoryview, int, int]]:
        parts: list[tuple[memoryview, int, int]] = []
        done = 0
        while done < count:
            view = self._views[self._number]
            size = min(view.nbytes - self._at, count - done)
            parts.append((view[self._at : self._at + size], done, done + size))
            done += size
            self._at += size
            if self._at == view.nbytes:
                self._number, self._at = self._number + 1, 0
        return parts


def _up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


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
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
        else:
            if flags & os.O_CREAT:
                self.permissions.give(fd)
            return fd, True
        # Some file systems create the file before they refuse.
        fd = os.open(path, flags & ~os.O_EXCL, 0o600)
        if flags & os.O_CREAT:
            self.permissions.give(fd)
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


def build_io(name: IoName, permissions: Permissions = PRIVATE) -> IoEngine:
    """The engine of that name."""
    io = DirectIo() if name == "odirect" else PosixIo()
    io.permissions = permissions
    return io
