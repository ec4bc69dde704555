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
import logging
import mmap
import os
import secrets
import stat
from collections import deque
from collections.abc import Sequence

from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, FrameType, UnitHeader

log = logging.getLogger(__name__)

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


class Places:
    """Which parts of a ring hold units that decode has not read."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._unread: deque[tuple[int, int]] = deque()
        """Start and end of each such unit, oldest first."""
        self._next = 0
        self._read = 0
        self._freed = asyncio.Event()

    def take(self, size: int) -> int | None:
        """Where so many bytes go, in one piece; None: they do not fit now."""
        start = self._room(size)
        if start is not None:
            self._unread.append((start, start + size))
            self._next = start + size
        return start

    def read(self, count: int) -> None:
        """Decode has read so many units since the ring began. Raises TransferError."""
        if not self._read <= count <= self._read + len(self._unread):
            raise TransferError(f"{count} units were read of {self._read + len(self._unread)}")
        while self._read < count:
            self._unread.popleft()
            self._read += 1
        self.wake()

    async def wait(self) -> None:
        """Until something may fit, or there will be no room any more."""
        self._freed.clear()
        await self._freed.wait()

    def wake(self) -> None:
        self._freed.set()

    def _room(self, size: int) -> int | None:
        if not self._unread:
            return 0 if size <= self._size else None
        oldest, at = self._unread[0][0], self._next
        if at > oldest:
            if at + size <= self._size:
                return at
            return 0 if size < oldest else None
        return at if at + size < oldest else None


class SendRing:
    """Prefill's end. Belongs to one connection, and ends with it."""

    counter = "transfer_shared_bytes"

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
        self._places = Places(size)
        self.taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether decode could open it."""

    def offer(self) -> Body:
        return {"pid": os.getpid(), "fd": self._fd, "mark": self._mark, "size": self.size}

    def opened(self, body: Body) -> None:
        """What decode says to the offer."""
        if not self.taken.done():
            if not body["open"]:
                told = self._connection.name, quoted(body.get("reason", ""))
                log.info("units to %s go over the socket: %s", *told)
            self.taken.set_result(body["open"])

    async def send(self, header: UnitHeader, views: Sequence[memoryview]) -> bool:
        """Copy a unit and announce it, when there is room. Raises ConnectionError when decode is
        gone."""
        while True:
            if self._connection.closed or self._fd < 0:
                raise ConnectionResetError("the connection is closed")
            start = self._places.take(header.nbytes)
            if start is not None:
                break
            await self._places.wait()
        at = MARK_BYTES + start
        for view in views:
            self._view[at : at + len(view)] = view
            at += len(view)
        self._connection.send_raw(FrameType.UNIT_AT, header.pack() + start.to_bytes(8, "little"))
        return True

    def read(self, count: int) -> None:
        self._places.read(count)

    def close(self) -> None:
        """Who waits for room hears that there will be none."""
        self._places.wake()
        if not self.taken.done():
            self.taken.set_result(False)
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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
