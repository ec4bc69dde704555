"""File operations behind a protocol, so that tests can break them; locks and forks."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid; length 0 = all of it
_HELD: Final = (errno.EAGAIN, errno.EACCES)


def share(fd: int) -> bool:
    """Mark the file as in use; False when another process claims it or it has no name left.

    Where the file system knows no locks nothing is marked, and the answer is True.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_RDLCK))
    except OSError as cause:
        return cause.errno not in _HELD
    # Whoever unlinks holds the lock meanwhile: a file that still has its name keeps it from now on.
    return os.fstat(fd).st_nlink > 0


def unshare(fd: int) -> None:
    """End the mark."""
    with contextlib.suppress(OSError):  # no locks here, so no mark
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK))


def is_shared(fd: int) -> bool:
    """Whether anybody else marks the file as in use; asking takes no lock."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


def claim(fd: int) -> bool:
    """Hold the file exclusively until its descriptor is closed; False while it is in use.

    fd: open for writing.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
    except OSError as cause:
        return cause.errno not in _HELD
    return True


def _request(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)


# Not weak methods: their callbacks print a traceback when the interpreter ends before they do.
_calls: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def call_in_children(owner: Any, method: Callable[[Any], None]) -> None:
    """Call `method(owner)` in every child forked from now on, as long as `owner` is there."""
    _calls[owner] = method


def give_up(descriptors: Iterable[int]) -> None:
    """In a child: close what was inherited; the locks on it stay with the parent alone."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _in_child() -> None:
    for owner, method in list(_calls.items()):
        method(owner)
    _calls.clear()


os.register_at_fork(after_in_child=_in_child)


Readable = bytes | bytearray | memoryview
IOV_MAX = 1024


class IoEngine(Protocol):
    """Positioned file I/O. Every call may raise OSError; short reads and writes are legal."""

    def create(self, path: Path) -> int: ...

    def open_read(self, path: Path) -> int: ...

    def open_write(self, path: Path) -> int: ...

    def close(self, fd: int) -> None: ...

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[Readable], offset: int) -> int: ...

    def allocate(self, fd: int, offset: int, length: int) -> None: ...

    def truncate(self, fd: int, length: int) -> None: ...

    def datasync(self, fd: int) -> None: ...

    def listdir(self, path: Path) -> list[str]: ...

    def mkdir(self, path: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def punch(self, fd: int, offset: int, length: int) -> None: ...

    def rmdir(self, path: Path) -> None: ...

    def disk_bytes(self, path: Path) -> int: ...

    def space(self, path: Path) -> tuple[int, int]: ...

    def try_lock(self, path: Path, *, create: bool) -> int | None: ...

    def share(self, fd: int) -> bool: ...

    def unshare(self, fd: int) -> None: ...

    def is_shared(self, path: Path) -> bool: ...

    def claim(self, path: Path) -> int | None: ...

    def facts(self) -> Mapping[str, str | int]: ...


def is_plain(io: IoEngine) -> bool:
    """Whether an engine is nothing but the operating system's calls, which compiled code may make
    in its place."""
    return type(io) is PosixIo


def is_full(error: OSError) -> bool:
    """Whether the file system, or a quota on it, has no room."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Of the files of a store; folders may be entered by who may read. gid: None = the process's.

    Where they are not the private default they are set, whatever the umask says.
    """

    mode: int = 0o600
    gid: int | None = None

    @property
    def folder_mode(self) -> int:
        """Of folders: who may read a file may enter, who may write may create."""
        return self.mode | (self.mode & 0o444) >> 2

    def give(self, file: int | Path, *, folder: bool = False) -> None:
        """Apply to a file or folder that was just made. raises: OSError."""
        if self == PRIVATE:
            return
        if self.gid is not None:
            os.chown(file, -1, self.gid)
        os.chmod(file, self.folder_mode if folder else self.mode)


PRIVATE: Final = Permissions()


class PosixIo:
    """The operating system's own calls."""

    permissions = PRIVATE

    def create(self, path: Path) -> int:
        return self._open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def open_read(self, path: Path) -> int:
        # Without O_NONBLOCK a pipe under the name of a segment would hang whoever opens it.
        return self._open(path, os.O_RDONLY | os.O_NONBLOCK)

    def open_write(self, path: Path) -> int:
        return self._open(path, os.O_RDWR)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Readable], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve the space of a range, where that makes writing there cheaper."""
        if _in_memory(fd):
            return  # there it means zeroing every page before it is written
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as cause:
            # Some file systems cannot preallocate; writing works all the same, only slower.
            if cause.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def datasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def listdir(self, path: Path) -> list[str]:
        return os.listdir(path)

    def mkdir(self, path: Path) -> None:
        path.mkdir(mode=0o700)
        self.permissions.give(path, folder=True)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give the space of a range back; it reads as zeros. Without effect where unsupported."""
        if _fallocate is not None:
            _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)

    def rmdir(self, path: Path) -> None:
        path.rmdir()

    def disk_bytes(self, path: Path) -> int:
        """Bytes the file occupies, preallocation included."""
        return os.stat(path).st_blocks * 512

    def space(self, path: Path) -> tuple[int, int]:
        """Free bytes (for unprivileged users) and all bytes of the file system."""
        stats = os.statvfs(path)
        return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize

    def try_lock(self, path: Path, *, create: bool) -> int | None:
        """Exclusive lock that ends with the process; None while another one holds it."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                self.permissions.give(fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd

    def share(self, fd: int) -> bool:
        """Mark an open file as in use until `unshare`; False when it is being deleted."""
        return share(fd)

    def unshare(self, fd: int) -> None:
        """End the mark of `share`."""
        unshare(fd)

    def is_shared(self, path: Path) -> bool:
        """Whether any process marks the file as in use."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return is_shared(fd)
        except OSError:
            return False  # no locks here, so no marks
        finally:
            os.close(fd)

    def claim(self, path: Path) -> int | None:
        """Descriptor that keeps others from using the file; None while another process does."""
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        if claim(fd):
            return fd
        os.close(fd)
        return None

    def facts(self) -> Mapping[str, str | int]:
        """For `stats()`: which engine this is and what it has to report."""
        return {"engine": "posix"}

    def _open(self, path: Path, flags: int) -> int:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        if flags & os.O_CREAT:
            self.permissions.give(fd)
        return fd


def write_all(io: IoEngine, fd: int, buffers: list[Readable], offset: int) -> None:
    """pwritev until everything is written; a short write continues where it stopped."""
    left = [memoryview(buffer) for buffer in buffers if len(buffer)]
    while left:
        written = io.pwritev(fd, left[:IOV_MAX], offset)
        if written <= 0:
            raise OSError(5, "the file system accepted no bytes")
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def read_fully(
    io: IoEngine, fd: int, buffers: Sequence[memoryview], offset: int, expected: int
) -> int:
    """preadv until the buffers, `expected` bytes, are full or the file ends; returns the bytes."""
    total = io.preadv(fd, buffers, offset)
    if total == expected:
        return total
    left = list(buffers)
    got = total
    while got > 0:
        while left and got >= left[0].nbytes:
            got -= left.pop(0).nbytes
        if not left:
            break
        if got:
            left[0] = left[0][got:]
        got = io.preadv(fd, left, offset + total)
        total += max(got, 0)
    return max(total, 0)


def _in_memory(fd: int) -> bool:
    """Whether the file lies in a tmpfs."""
    if _fstatfs is None:
        return False
    answer = (ctypes.c_long * 32)()  # more than a `struct statfs`, whose first word is the type
    return _fstatfs(fd, answer) == 0 and answer[0] == _TMPFS_MAGIC


def _libc(name: str, *arguments: Any) -> Callable[..., int] | None:
    """A function of the C library that the standard library has no counterpart of."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    return function


_KEEP_SIZE = 1
_PUNCH_HOLE = 2
_TMPFS_MAGIC = 0x01021994
_fallocate = _libc("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_fstatfs = _libc("fstatfs", ctypes.c_int, ctypes.c_void_p)


FileStamp = tuple[int, int, int] | None


def stamp_of(file: Path | int) -> FileStamp:
    """What changes whenever a file is replaced or written; None while there is none."""
    with contextlib.suppress(OSError):
        seen = os.stat(file)
        return seen.st_ino, seen.st_size, seen.st_mtime_ns
    return None
