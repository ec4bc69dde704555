"""Units by one-sided writes of Mooncake's transfer engine: its TCP, or RDMA between machines.

Decode lends prefill a landing place, registered with the library, that no prompt lives in; prefill
copies a unit into a registered place of its own, has the library write it over, and announces it on
the connection with its header and place. Decode copies it to where it belongs and judges what is
there then, so a write that comes late, or of somebody else, is a unit that arrived damaged. A grant
ends as on every way: its blocks were never written from outside. A place whose peer is gone is
taken from the library, so that writes to it are refused, and its memory is lent again but never
given back: a write that had begun could still end there.

The library asks nobody who they are, seals nothing and listens on every interface: it is for
networks that are trusted, and used only where the operator says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.shared import Places
from deepinfer_engine.pd.transport import Connection
from deepinfer_engine.pd.wire import Body, FrameType, UnitHeader

log = logging.getLogger(__name__)

LANDING_BYTES = 16 << 20
"""Of one prefill worker's units at one decode worker, and of its own copy of them."""
INSTALL = "pip install './packages/engine[mooncake]'"
_DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_OLDEST = (0, 3, 13)


class WriteEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are used here. 0 is success."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, size: int, /) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def transfer_sync_write(self, target: str, address: int, peer: int, size: int, /) -> int: ...


def load_engine() -> WriteEngine:
    """The library's engine, not started. Raises ConfigError with what to install."""
    found = ""
    for name in _DISTRIBUTIONS:
        try:
            found = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    if not found:
        raise ConfigError(f"--transfer mooncake needs Mooncake's transfer engine: {INSTALL}")
    version = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if version < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        raise ConfigError(
            f"--transfer mooncake needs its transfer engine {wanted} or newer, {found} is there: "
            f"{INSTALL}"
        )
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else a line for every transfer
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"Mooncake's transfer engine {found} cannot be loaded ({error}): its build for CUDA "
            f"needs CUDA's libraries, each needs libibverbs1 (apt install libibverbs1); {INSTALL}"
        ) from None
    return cast(WriteEngine, module.TransferEngine())


class RemoteWrites:
    """This process's end of the library, and the memory that it registered. Used from any thread
    for `write`, else from one."""

    def __init__(
        self, host: str, *, rdma: str | None = None, engine: WriteEngine | None = None
    ) -> None:
        """`host`: what other workers call this machine. `rdma`: the device; None = TCP. Raises
        ConfigError."""
        self._engine = load_engine() if engine is None else engine
        way = "tcp" if rdma is None else "rdma"
        if self._engine.initialize(host, "P2PHANDSHAKE", way, rdma or "") != 0:
            raise ConfigError(
                f"Mooncake's transfer engine does not start on {host} by {way}"
                + ("" if rdma is None else f" with the device {rdma!r}")
            )
        name = f"[{host}]" if ":" in host else host
        self.session = f"{name}:{self._engine.get_rpc_port()}"
        """How other workers' writes find this process."""
        self._spare: list[NDArray[np.uint8]] = []

    def borrow(self, size: int) -> NDArray[np.uint8]:
        """Registered memory. What it holds is of an earlier use. Raises TransferError."""
        for i, memory in enumerate(self._spare):
            if memory.nbytes == size:
                self._spare.pop(i)
                break
        else:
            memory = np.zeros(size, dtype=np.uint8)
        if self._engine.register_memory(memory.ctypes.data, size) != 0:
            self._spare.append(memory)
            raise TransferError(f"Mooncake's transfer engine does not register {size} bytes")
        return memory

    def give_back(self, memory: NDArray[np.uint8]) -> None:
        """No write reaches it any more, but one that has begun."""
        self._engine.unregister_memory(memory.ctypes.data)
        self._spare.append(memory)

    def write(self, session: str, memory: NDArray[np.uint8], at: int, size: int, peer: int) -> bool:
        """Write to address `peer` of another process; blocks. False: it did not work."""
        return self._engine.transfer_sync_write(session, memory.ctypes.data + at, peer, size) == 0


class WriteRing:
    """Prefill's end: a place of its own for each unit on the way, and the same one at decode."""

    counter = "transfer_remote_bytes"

    def __init__(self, connection: Connection, writes: RemoteWrites) -> None:
        self._connection = connection
        self._writes = writes
        self._session, self._address = "", 0
        self.size = 0
        """Of the place that decode lends; 0 until it did."""
        self._places = Places(0)
        self._memory: NDArray[np.uint8] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remote-writes")
        """One: writes end in the order of their places, and are announced in it."""
        self._moves: set[asyncio.Task[bool]] = set()
        self._failed = False
        """Set by the thread: after a write that did not work none is announced, so none is made."""
        self._useless = False
        self.taken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether decode lends a place."""

    def lent(self, body: Body) -> None:
        """What decode says to the request for a place. Raises TransferError."""
        if self.taken.done():
            raise TransferError("a second landing place on one connection")
        size, trouble = body.get("size", 0), quoted(body.get("reason", ""))
        if size:
            try:
                self._memory = self._writes.borrow(size)
            except TransferError as error:
                trouble = str(error)
        if self._memory is None:
            log.warning("units to %s go over the connection: %s", self._connection.name, trouble)
            self.taken.set_result(False)
            return
        self._session, self._address = body["session"], body["address"]
        self.size, self._places = size, Places(size)
        self.taken.set_result(True)

    async def send(self, header: UnitHeader, views: Sequence[memoryview]) -> bool:
        """Move a unit and announce it; False: send it over the connection, and all after it.

        Its source may change when this returns or is cancelled: what moves is a copy. Raises
        ConnectionError when decode is gone.
        """
        start = None
        while not self._useless and start is None:
            start = self._places.take(header.nbytes)
            if start is None:
                await self._places.wait()
        if self._connection.closed:
            raise ConnectionResetError("the connection is closed")
        if self._useless or self._memory is None or start is None:
            return False
        at = start
        for view in views:
            self._memory[at : at + len(view)] = np.frombuffer(view, dtype=np.uint8)
            at += len(view)
        # A task of its own: whoever waits here may be cancelled, the place is to be told of.
        move = asyncio.get_running_loop().create_task(self._move(header, start))
        self._moves.add(move)
        move.add_done_callback(self._moves.discard)
        return await asyncio.shield(move)

    async def _move(self, header: UnitHeader, start: int) -> bool:
        events = asyncio.get_running_loop()
        if not await events.run_in_executor(self._thread, self._write, start, header.nbytes):
            if not self._useless:
                log.warning(
                    "a write to %s failed: units go over the connection", self._connection.name
                )
                self._give_up()
            return False
        told = header.pack() + start.to_bytes(8, "little")
        self._connection.send_raw(FrameType.UNIT_AT, told)
        return True

    def _write(self, start: int, size: int) -> bool:
        """In the thread."""
        memory = self._memory
        if self._failed or self._useless or memory is None:
            return False
        done = self._writes.write(self._session, memory, start, size, self._address + start)
        self._failed = not done
        return done

    def _give_up(self) -> None:
        self._useless = True
        self._places.wake()

    def read(self, count: int) -> None:
        self._places.read(count)

    def close(self) -> None:
        """Who waits for room hears that there will be none; memory goes when no write uses it."""
        self._give_up()
        if not self.taken.done():
            self.taken.set_result(False)
        memory, self._memory = self._memory, None
        if memory is not None:
            events = asyncio.get_running_loop()
            ended = self._thread.submit(lambda: None)
            ended.add_done_callback(lambda _: self._give_back(events, memory))
        self._thread.shutdown(wait=False)

    def _give_back(self, events: asyncio.AbstractEventLoop, memory: NDArray[np.uint8]) -> None:
        with contextlib.suppress(RuntimeError):  # the worker has ended, and its loop with it
            events.call_soon_threadsafe(self._writes.give_back, memory)


class Landing:
    """Decode's end: the place that one prefill worker writes."""

    def __init__(self, writes: RemoteWrites, size: int = LANDING_BYTES) -> None:
        """Raises TransferError."""
        self._writes = writes
        self._memory = writes.borrow(size)
        self._view = self._memory.data
        self.count = 0
        """Units read."""

    def offer(self) -> Body:
        address = int(self._memory.ctypes.data)
        return {
            "session": self._writes.session,
            "address": address,
            "size": self._memory.nbytes,
        }

    def payload(self, header: UnitHeader, start: int) -> memoryview:
        """The bytes of a unit. Raises TransferError for a place outside."""
        end = start + header.nbytes
        if end > len(self._view):
            raise TransferError(f"unit {header.unit} lies outside its landing place")
        self.count += 1
        return self._view[start:end]

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._view.release()
        self._writes.give_back(self._memory)
