"""Locks on open files that end with their holder, for telling other processes what is in use.

They belong to the open file description, so two descriptors of one process exclude each other as
those of two processes do, and the kernel gives them back when the holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from typing import Final

_FLOCK: Final = struct.Struct("hhqqi4x")  # type, whence, start, length, pid; length 0 = all of it
_HELD: Final = (errno.EAGAIN, errno.EACCES)


def share(fd: int) -> bool:
    """Mark the file as in use; False when somebody holds it exclusively or it has no name left.

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
