"""Reads and writes of segments on 3FS by its user-space rings (USRBIO) instead of the FUSE mount.

Bytes travel through shared memory that the 3FS client process reads from and writes to; requests
and results through rings, one for reads and one for writes in each thread. Written from the public
documentation of that interface and tried with an imitation of it only: no 3FS was at hand.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.store.staged import StagedIo

STAGING_BYTES: Final = 8 << 20
REQUEST_BYTES: Final = 1 << 20
"""A transfer is cut into requests of this size, which 3FS serves side by side."""
TIMEOUT_S: Final = 10.0


class _SharedMemory:
    """Memory that 3FS can map by its name under /dev/shm; it lives while something refers to it.

    Not the standard library's class: that one watches names by a process of its own, and complains
    when the last view of memory goes after it.
    """

    def __init__(self, size: int) -> None:
        self.name = f"kvtier-{secrets.token_hex(8)}"
        self.size = size
        self._path = Path("/dev/shm", self.name)
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
            self.buf = memoryview(mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Take the name away; the memory stays."""
        self._path.unlink()


@dataclass(slots=True)
class _Rings:
    """What one thread needs; never used again after a request of it failed to come back."""

    memory: _SharedMemory
    iov: Any
    reads: Any
    writes: Any


class UsrbioIo(StagedIo):
    """`IoEngine` for a store on a 3FS mount.

    path:   any path on the mount.
    raises: ConfigError without 3FS's Python module, or where `path` is not on 3FS.
    """

    def __init__(self, path: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        try:
            self._api: Any = import_module("hf3fs_fuse.io")
        except ImportError as cause:
            raise ConfigError(
                "io='usrbio' needs the Python module hf3fs_fuse, which is built with 3FS and is on"
                " no package index; without it io='posix' works on the mount"
            ) from cause
        mount = self._api.extract_mount_point(str(path.absolute()))
        if mount is None:
            raise ConfigError(f"io='usrbio' needs a directory on a 3FS mount, {path} is not on one")
        self._mount = str(mount)
        self._timeout = timedelta(seconds=timeout_s)
        self._own = threading.local()
        self._timeouts = 0

    def facts(self) -> Mapping[str, str | int]:
        """timeouts: requests that 3FS did not answer in time."""
        return {"engine": "usrbio", "timeouts": self._timeouts}

    def _open_segment(self, path: Path, flags: int) -> tuple[int, bool]:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            self._api.register_fd(fd)
        except OSError:
            os.close(fd)
            raise
        return fd, True

    def _leave(self, fd: int) -> None:
        self._api.deregister_fd(fd)

    def _staging(self) -> memoryview:
        return self._rings().memory.buf

    def _read(self, fd: int, room: memoryview, offset: int) -> int:
        return self._transfer(fd, len(room), offset, reads=True)

    def _write(self, fd: int, span: memoryview, offset: int) -> int:
        return self._transfer(fd, len(span), offset, reads=False)

    def _transfer(self, fd: int, length: int, offset: int, *, reads: bool) -> int:
        """Move the first `length` bytes of this thread's memory; returns how many came through."""
        rings = self._rings()
        ring = rings.reads if reads else rings.writes
        starts = range(0, length, REQUEST_BYTES)
        try:
            for start in starts:
                piece = rings.iov[start : min(start + REQUEST_BYTES, length)]
                ring.prepare(piece, reads, fd, offset + start, userdata=start)
            ring.submit()
            results = self._results(ring, len(starts))
        except OSError:
            # A request may still be under way and write into this memory whenever it likes.
            del self._own.rings
            raise
        done = 0
        for start in starts:
            result = results[start]
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            done += result
            if result < min(REQUEST_BYTES, length - start):
                break  # what lies behind a short one is not the next byte of the file
        return done

    def _results(self, ring: Any, count: int) -> dict[int, int]:
        """Of each request, by its start: bytes, or a negative error number. raises: OSError."""
        results: dict[int, int] = {}
        while len(results) < count:
            answers = ring.wait(min_results=count - len(results), timeout=self._timeout)
            if not answers:
                self._timeouts += 1
                raise OSError(errno.ETIMEDOUT, "3FS did not answer in time")
            results.update((answer.userdata, answer.result) for answer in answers)
        return results

    def _rings(self) -> _Rings:
        rings: _Rings | None = getattr(self._own, "rings", None)
        if rings is None:
            memory = _SharedMemory(STAGING_BYTES)
            try:
                iov = self._api.make_iovec(memory, self._mount, 0, -1)
            finally:
                memory.unlink()  # the mapping stays
            entries = STAGING_BYTES // REQUEST_BYTES
            reads = self._api.make_ioring(self._mount, entries, True, 0)
            writes = self._api.make_ioring(self._mount, entries, False, 0)
            rings = self._own.rings = _Rings(memory, iov, reads, writes)
        return rings
