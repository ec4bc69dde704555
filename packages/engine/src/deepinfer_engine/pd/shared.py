"""Units between two workers of one machine: bytes in shared memory, everything else as before.

Prefill owns a ring in an anonymous file of its own (memfd), which decode opens through /proc: only
processes of the same user can, nothing has a name that could be guessed or left behind, and a
random mark at its start tells that it is the one that was meant. A unit is copied into the ring and
announced on the connection with its header and place; decode checks and lands it as if it had come
over the socket, and says how many it has read. A place is written again only after that: a source
has two owners, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Sequence

from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, FrameType, UnitHeader

MARK_BYTES = 32
RING_BYTES = 8 << 20
"""Small: what was written is read while it lies in a cache, and no page is touched anew."""
MOST_BYTES = 1 << 32


def place_of(data: memoryview) -> tuple[UnitHeader, int]:
    """The header of a unit that lies in a ring, and where. Raises TransferError."""
    if len(data) != wire.UNIT_HEADER_BYTES + 8:
        raise TransferError(f"a unit in shared memory is told in {len(data)} bytes")
    header = UnitHeader.unpack(data[: wire.UNIT_HEADER_BYTES], elsewhere=True)
    return header, int.from_bytes(data[wire.UNIT_HEADER_BYTES :], "little")


class SendRing:
    """Prefill's end. Belongs to one connection, and ends with it."""

    def __init__(self, connection: Connection, size: int = RING_BYTES) -> None:
        """Raises OSError where the system has no memfd."""
        self._connection = connection
        self.size = size
        self._mark = secrets.token_bytes(MARK_BYTES)
        self._fd = os.memfd_create("deepinfer-units", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, MARK_BYTES + size)
        self._map = mmap.mmap(self._fd, MARK_BYTES + size)
        self._map[:MARK_BYTES] = self._mark
        self._view = memoryview(self._map)
        self._unread: deque[tuple[int, int]] = deque()
        """Start and end of each unit that decode has not read yet, oldest first."""
        self._next = 0
        self._read = 0
        self._freed = asyncio.Event()
        self.taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether decode could open it."""

    def offer(self) -> Body:
        return {"pid": os.getpid(), "fd": self._fd, "mark": self._mark, "size": self.size}

    async def send(self, header: UnitHeader, views: Sequence[memoryview]) -> None:
        """Copy a unit and announce it, when there is room. Raises ConnectionError when decode is
        gone."""
        while True:
            if self._connection.closed or self._fd < 0:
                raise ConnectionResetError("the connection is closed")
            start = self._room(header.nbytes)
            if start is not None:
                break
            self._freed.clear()
            await self._freed.wait()
        at = MARK_BYTES + start
        for view in views:
            self._view[at : at + len(view)] = view
            at += len(view)
        self._unread.append((start, start + header.nbytes))
        self._next = start + header.nbytes
        self._connection.send_raw(FrameType.UNIT_AT, header.pack() + start.to_bytes(8, "little"))

    def read(self, count: int) -> None:
        """Decode has read so many units since the ring began. Raises TransferError."""
        if not self._read <= count <= self._read + len(self._unread):
            raise TransferError(f"{count} units were read of {self._read + len(self._unread)}")
        while self._read < count:
            self._unread.popleft()
            self._read += 1
        self._freed.set()

    def close(self) -> None:
        """Who waits for room hears that there will be none."""
        self._freed.set()
        if not self.taken.done():
            self.taken.set_result(False)
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _room(self, size: int) -> int | None:
        """Where so many bytes fit now, in one piece."""
        if not self._unread:
            return 0 if size <= self.size else None
        oldest, at = self._unread[0][0], self._next
        if at > oldest:
            if at + size <= self.size:
                return at
            return 0 if size < oldest else None
        return at if at + size < oldest else None


class ReceiveRing:
    """Decode's end."""

    def __init__(self, offer: Body) -> None:
        """Raises TransferError where it cannot be opened, as from another machine, or is not the
        one that was meant."""
        pid, fd, size = offer["pid"], offer["fd"], offer["size"]
        if not 0 < size <= MOST_BYTES:
            raise TransferError(f"a ring of {size} bytes")
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # it might be a pipe of somebody's
            opened = os.open(f"/proc/{pid}/fd/{fd}", flags)
        except OSError as error:
            raise TransferError(f"shared memory of process {pid}: {error.strerror}") from None
        try:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or found.st_size != MARK_BYTES + size:
                raise TransferError("the shared memory has another size")
            self._map = mmap.mmap(opened, MARK_BYTES + size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError(f"shared memory cannot be read: {error}") from None
        finally:
            os.close(opened)
        self._view = memoryview(self._map)
        if self._view[:MARK_BYTES] != offer["mark"]:
            self.close()
            raise TransferError("the shared memory is not the one that was meant")
        self._size = size
        self.count = 0
        """Units read."""

    def payload(self, header: UnitHeader, start: int) -> memoryview:
        """The bytes of a unit. Raises TransferError for a place outside the ring."""
        end = start + header.nbytes
        if end > self._size:
            raise TransferError(f"unit {header.unit} lies outside the shared memory")
        self.count += 1
        return self._view[MARK_BYTES + start : MARK_BYTES + end]

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
