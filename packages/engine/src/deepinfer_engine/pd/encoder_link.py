"""A prefill worker's connection to one encode worker."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from dataclasses import dataclass
from typing import Literal

from deepinfer_engine.core.pictures import Picture, RowForm
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.messages import PIXEL_PIECE_BYTES, xid_body
from deepinfer_engine.pd.quoting import quoted
from deepinfer_engine.pd.rings import UnitReceiver
from deepinfer_engine.pd.rows import RowLanding
from deepinfer_engine.pd.schema import BadMessage
from deepinfer_engine.pd.transport import Connection, Frame
from deepinfer_engine.pd.wire import Body, FrameType, Xid

log = logging.getLogger(__name__)

SILENT_S = 15.0
"""An encode worker that owes something, and has not even sent a heartbeat for so long, is lost."""
Reason = Literal["request", "failed", "busy", "draining", "version", "stale", "lost", "damaged"]


class NotEncoded(Exception):  # noqa: N818 - what became of one ask, not an error of the package
    """There are no rows of this encode worker. `begun`: it may have been computing them."""

    def __init__(self, reason: Reason, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.reason: Reason = reason
        self.begun = begun


@dataclass(eq=False, slots=True)
class _Ask:
    xid: Xid
    grant_id: int
    picture: Picture
    landing: RowLanding
    rows: asyncio.Future[memoryview]
    sending: asyncio.Task[None] | None = None
    """Set when its pixels were wanted."""

    def fail(self, reason: Reason, message: str) -> None:
        if not self.rows.done():
            self.rows.set_exception(NotEncoded(reason, message, begun=self.sending is not None))

    @property
    def body(self) -> Body:
        return {**xid_body(self.xid), "grant_id": self.grant_id}


class EncoderLink:
    """Belongs to one event loop; `run` it until it ends."""

    def __init__(self, connection: Connection, form: RowForm, address: str) -> None:
        self._connection = connection
        self._form = form
        self._address = address
        self._receiver = UnitReceiver(connection)
        self._asks: dict[int, _Ask] = {}
        # A late unit of another run of this worker must not meet a grant of this one.
        self._grants = itertools.count(secrets.randbits(48))
        self._heard = True
        self.pixel_bytes = 0
        """Sent over it."""

    @property
    def epoch(self) -> int:
        return int(self._connection.hello["epoch"])

    @property
    def closed(self) -> bool:
        return self._connection.closed

    async def rows(self, xid: Xid, picture: Picture, salt: str, *, alone: bool) -> memoryview:
        """The embeddings of a picture, checked. Raises NotEncoded. Cancelled, it takes back all
        that this attempt has asked here."""
        made: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        landing = RowLanding(xid.attempt, picture.length, self._form)
        ask = _Ask(xid, next(self._grants), picture, landing, made)
        if self.closed:
            ask.fail("lost", f"the encode worker {self._address} went away")
            return await made
        self._asks[ask.grant_id] = ask
        self._connection.send(
            FrameType.ENCODE,
            {
                **ask.body,
                "epoch": self.epoch,
                "version": self._form.version,
                "width": picture.width,
                "height": picture.height,
                "tokens": picture.length,
                "digest": picture.digest,
                "salt": salt,
                "alone": alone,
            },
        )
        try:
            return await made
        except asyncio.CancelledError:
            self._connection.send(FrameType.ABORT, {**xid_body(xid), "reason": "left"})
            raise
        finally:
            del self._asks[ask.grant_id]
            if ask.sending is not None:
                ask.sending.cancel()

    async def run(self) -> None:
        """Hear what the worker says until it is gone; then every ask fails."""
        watching = asyncio.create_task(self._close_when_silent())
        why = "went away"
        try:
            while (frame := await self._connection.receive()) is not None:
                self._heard = True
                try:
                    self._hear(frame)
                except BadMessage as error:
                    if error.xid is None:
                        raise
                    for ask in self._asks.values():
                        if ask.xid == error.xid:
                            ask.fail("damaged", str(error))
        except TransferError as error:
            why = f"broke the protocol: {quoted(error)}"
            log.warning("closing the connection of %s: %s", self._connection.name, quoted(error))
        finally:
            watching.cancel()
            self._connection.close()
            self._receiver.close()
            for ask in list(self._asks.values()):
                ask.fail("lost", f"the encode worker {self._address} {why}")

    def _hear(self, frame: Frame) -> None:
        if frame.type in (FrameType.UNIT, FrameType.UNIT_AT):
            self._unit(frame)
            return
        match frame.type:
            case FrameType.SHARED:
                self._receiver.open(frame.body())
            case FrameType.PIXELS_WANTED:
                ask = self._asks.get(frame.body()["grant_id"])
                if ask is not None and ask.sending is None:
                    ask.sending = asyncio.create_task(self._send_pixels(ask))
            case FrameType.EMBEDDED:
                body = frame.body()
                ask = self._asks.get(body["grant_id"])
                if ask is not None and not ask.rows.done():
                    try:
                        ask.rows.set_result(ask.landing.committed(body))
                    except TransferError as error:
                        ask.fail("damaged", str(error))
            case FrameType.NOT_EMBEDDED:
                body = frame.body()
                ask = self._asks.get(body["grant_id"])
                if ask is not None:
                    ask.fail(body["reason"], quoted(body["message"]))
            case FrameType.HEARTBEAT | FrameType.ABORT_ACK | FrameType.ABORT | FrameType.GONE:
                pass
            case _:
                raise TransferError(f"an encode worker may not send a frame of type {frame.type}")

    def _unit(self, frame: Frame) -> None:
        header, payload = self._receiver.unit(frame)
        ask = self._asks.get(header.grant_id)
        if ask is not None and not ask.rows.done():
            try:
                ask.landing.unit(header, payload)
            except TransferError as error:
                ask.fail("damaged", str(error))
        payload.release()
        self._receiver.read(frame)

    async def _send_pixels(self, ask: _Ask) -> None:
        view = memoryview(ask.picture.pixels)
        try:
            for start in range(0, len(view), PIXEL_PIECE_BYTES):
                piece = view[start : start + PIXEL_PIECE_BYTES]
                self._connection.send(FrameType.PICTURE_PIXELS, {**ask.body, "data": piece})
                self.pixel_bytes += len(piece)
                await self._connection.drain()
        except OSError:
            pass  # `run` tells every ask

    async def _close_when_silent(self) -> None:
        while True:
            self._heard = False
            await asyncio.sleep(SILENT_S)
            if not self._heard and self._asks:
                log.warning("encode worker %s: silent for %.0f s", self._address, SILENT_S)
                self._connection.close()
