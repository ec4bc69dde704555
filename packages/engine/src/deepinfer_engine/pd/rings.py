"""Both ends of the units between two workers: shared memory on one machine, else the socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.remote_writes import Landing, RemoteWrites, WriteRing
from deepinfer_engine.pd.sending import Unit
from deepinfer_engine.pd.shared import ReceiveRing, SendRing, place_of
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import UNIT_HEADER_BYTES, Body, FrameType, UnitHeader

log = logging.getLogger(__name__)

SHARE_S = 5.0
OF_RINGS = (FrameType.SHARED_OPEN, FrameType.LANDING, FrameType.UNITS_READ)
"""What the receiver of units says of a ring."""


class UnitSender:
    """Units to any number of peers, and how many that were."""

    def __init__(self) -> None:
        self.shares_memory = True
        """Whether units to peers of this machine go through shared memory."""
        self.writes: RemoteWrites | None = None
        """With it, units go by one-sided writes, and none through shared memory."""
        self._rings: dict[Connection, SendRing | WriteRing] = {}
        self.counters = {
            "transfer_units": 0,
            "transfer_bytes": 0,
            "transfer_shared_bytes": 0,
            "transfer_remote_bytes": 0,
        }

    async def share(self, peer: Connection) -> None:
        """Have units go through memory that both reach; where that cannot be, they go over the
        socket."""
        if self.writes is not None:
            ring = self._rings[peer] = WriteRing(peer, self.writes)
            peer.send(FrameType.LANDING_WANTED, {})
            await self._taken(peer, ring)
        elif self.shares_memory and peer.peer_host and transport.is_loopback(peer.peer_host):
            try:
                ring = self._rings[peer] = SendRing(peer)
            except OSError as error:
                log.info("no shared memory for units: %s", error)
                return
            peer.send(FrameType.SHARED, ring.offer())
            await self._taken(peer, ring)

    async def _taken(self, peer: Connection, ring: SendRing | WriteRing) -> None:
        try:
            async with asyncio.timeout(SHARE_S):
                taken = await ring.taken
        except TimeoutError:
            taken = False
        if not taken:
            self._rings.pop(peer, None)
            ring.close()

    async def send(self, peer: Connection, units: Iterable[Unit]) -> None:
        """Raises ConnectionError when the peer is gone."""
        ring = self._rings.get(peer)
        if ring is not None and not (ring.taken.done() and ring.taken.result()):
            ring = None  # the peer has not said that it reads there
        for unit in units:
            fits = ring is not None and unit.header.nbytes <= ring.size
            if ring is not None and fits and await ring.send(unit.header, unit.views):
                self.counters[ring.counter] += unit.header.nbytes
            else:
                peer.send_unit(unit.header, unit.views)
            self.counters["transfer_units"] += 1
            self.counters["transfer_bytes"] += unit.header.nbytes
            await peer.drain()

    def hear(self, peer: Connection, kind: FrameType, body: Body) -> None:
        """One of `OF_RINGS`. Raises TransferError."""
        ring = self._rings.get(peer)
        if ring is None:
            raise TransferError(f"{kind.name} of a ring that was not offered")
        if kind is FrameType.UNITS_READ:
            ring.read(body["count"])
        elif isinstance(ring, WriteRing) and kind is FrameType.LANDING:
            ring.lent(body)
        elif isinstance(ring, SendRing) and kind is FrameType.SHARED_OPEN:
            ring.opened(body)
        else:
            raise TransferError(f"{kind.name} of another ring than was offered")

    def lost(self, peer: Connection) -> None:
        ring = self._rings.pop(peer, None)
        if ring is not None:
            ring.close()


class UnitReceiver:
    """One peer's units, wherever they lie."""

    def __init__(self, peer: Connection) -> None:
        self._peer = peer
        self._ring: ReceiveRing | Landing | None = None

    def open(self, offer: Body) -> None:
        """A SHARED. Raises TransferError for a second one."""
        if self._ring is not None:
            raise TransferError("a second ring on one connection")
        try:
            self._ring = ReceiveRing(offer)
        except TransferError as error:
            self._peer.send(FrameType.SHARED_OPEN, {"open": False, "reason": str(error)})
        else:
            self._peer.send(FrameType.SHARED_OPEN, {"open": True})

    def lend(self, writes: RemoteWrites | None) -> None:
        """A LANDING_WANTED. Raises TransferError for a second one."""
        if self._ring is not None:
            raise TransferError("a second landing place on one connection")
        if writes is None:
            text = {"reason": "this worker has no --transfer mooncake"}
            self._peer.send(FrameType.LANDING, text)
            return
        try:
            self._ring = Landing(writes)
        except TransferError as error:
            self._peer.send(FrameType.LANDING, {"reason": str(error)})
        else:
            self._peer.send(FrameType.LANDING, self._ring.offer())

    def unit(self, frame: Frame) -> tuple[UnitHeader, memoryview]:
        """Header and bytes of a UNIT or UNIT_AT; `read` once they are not needed any more."""
        if frame.type == FrameType.UNIT:
            return UnitHeader.unpack(frame.data), frame.data[UNIT_HEADER_BYTES:]
        if self._ring is None:
            raise TransferError("a unit in memory that was not offered, or not lent")
        header, start = place_of(frame.data)
        return header, self._ring.payload(header, start)

    def read(self, frame: Frame) -> None:
        """Its place in shared memory may be written again."""
        if frame.type == FrameType.UNIT_AT and self._ring is not None:
            self._peer.send(FrameType.UNITS_READ, {"count": self._ring.count})

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()
