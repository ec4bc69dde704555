"""Prefill and encode workers against peers that lie to them, and whoever sits between."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from seeing_cluster import expected, no_other_notices, seeing
from seeing_toy import (
    FORM,
    PIXELS,
    RULES,
    SAME,
    SIDE,
    ToyEncoder,
    pixels,
    rows_of,
    seen,
)
from toy_engine import KEY, ask, identity, run, start_worker, until

from deepinfer_engine.core.pictures import Picture, picture_digest
from deepinfer_engine.errors import EngineUnavailable, RequestError, TransferError
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.encode import EncodeService
from deepinfer_engine.pd.rows import finite, row_units
from deepinfer_engine.pd.wire import FrameType


class Liar:
    """An encode worker that this test plays; `answer(peer, ask, units, body)` sends its rows."""

    def __init__(self, answer):
        self.answer = answer
        self.tasks = []
        self.aborted = []

    async def __aenter__(self):
        self.server = await transport.listen("127.0.0.1", 0, self._made)
        return f"127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _made(self, peer):
        self.tasks.append(asyncio.create_task(self._serve(peer)))

    async def _serve(self, peer):
        hello = identity("encode", pid=1, model=SAME.model, dtype=SAME.dtype)
        await transport.accept(peer, hello, KEY)
        beat = {"counters": {}, "gauges": {}, "draining": False}
        peer.send(FrameType.HEARTBEAT, beat)
        while (frame := await peer.receive()) is not None:
            if frame.type == FrameType.ABORT:
                self.aborted.append(frame.body()["rid"])
            if frame.type != FrameType.ENCODE:
                continue
            body = frame.body()
            made = Picture(0, body["tokens"], SIDE, SIDE, body["digest"], pixels(1))
            units = list(row_units(body["grant_id"], body["attempt"], made.length, rows_of(made)))
            ask = {name: body[name] for name in ("rid", "attempt", "grant_id")}
            combined = 0
            for unit in units:
                combined = wire.add_to_combined(combined, unit.header.unit, unit.header.digest)
            whole = {
                **ask, "n_units": len(units), "digest": combined, "dtype": "float64",
                "rows": made.length, "channels": RULES.channels, "cached": True,
            }  # fmt: skip
            self.answer(peer, ask, units, whole)


def sent(peer, units, body, **changes):
    for unit in units:
        peer.send_unit(unit.header, unit.views)
    peer.send(FrameType.EMBEDDED, {**body, **changes})


def honest(peer, ask, units, body):
    sent(peer, units, body)


def changed(**fields):
    return lambda peer, ask, units, body: sent(peer, units, body, **fields)


def with_header(**fields):
    def answer(peer, ask, units, body):
        made = [replace(unit, header=replace(unit.header, **fields)) for unit in units]
        sent(peer, made, body)

    return answer


def flipped(peer, ask, units, body):
    data = bytearray(units[0].views[0])
    data[5] ^= 1
    sent(peer, [replace(units[0], views=(memoryview(data),))], body)


def infinite(peer, ask, units, body):
    rows = np.full(body["rows"] * body["channels"], 1.0)
    rows[7] = np.nan
    view = memoryview(bytearray(rows.tobytes()))
    (unit,) = row_units(ask["grant_id"], ask["attempt"], body["rows"], view)
    combined = wire.add_to_combined(0, 0, unit.header.digest)
    sent(peer, [unit], body, digest=combined)


def first_half_twice(peer, ask, units, body):
    """As many units and bytes as there should be, and the second half never written."""
    view = units[0].views[0][: len(units[0].views[0]) // 2]
    one, combined, made = units[0].header, 0, []
    for number in range(2):
        header = replace(one, unit=number, nbytes=len(view), digest=wire.unit_digest([view]))
        combined = wire.add_to_combined(combined, number, header.digest)
        made.append(replace(units[0], header=header, views=(view,)))
    sent(peer, made, body, n_units=2, digest=combined)


LIES = {
    "another dtype": changed(dtype="float32"),
    "more rows": changed(rows=99),
    "fewer channels": changed(channels=1),
    "another digest": changed(digest=1),
    "another count": changed(n_units=2),
    "no units": lambda peer, ask, units, body: sent(peer, [], body, n_units=0, digest=0),
    "twice": lambda peer, ask, units, body: sent(peer, [*units, *units], body),
    "half of it twice": first_half_twice,
    "a damaged unit": flipped,
    "not a number": infinite,
    "beyond the end": with_header(block_first=8),
    "of another group": with_header(group=0),
    "of another attempt": with_header(attempt=7),
    "of other tokens": with_header(token_count=3),
    "of nobody's grant": with_header(grant_id=5),
    "no message": changed(rows=-1),
    "an unknown key": changed(colour="red"),
    "failed": lambda peer, ask, units, body: peer.send(
        FrameType.NOT_EMBEDDED, {**ask, "reason": "failed", "message": "no"}
    ),
    "an unknown frame": lambda peer, ask, units, body: peer.send(FrameType.TOKENS, {}),
    "a close": lambda peer, ask, units, body: peer.close(),
}


def test_a_worker_that_does_not_lie_is_believed():
    (tokens,) = expected(seen("a", 1))

    async def body():
        async with Liar(honest) as address, seeing(addresses=[address]) as it:
            assert (await ask(it.engine, seen("a", 1))).tokens == tokens

    run(body())


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_no_lie_of_an_encode_worker_is_read_by_the_model(lie):
    async def body():
        async with Liar(lie) as address, seeing(addresses=[address]) as it:
            with pytest.raises(EngineUnavailable, match="a picture could not be encoded"):
                await ask(it.engine, seen("a", 1))
            assert it.asked()["pictures_fetched"] == 0
            await no_other_notices(it)

    run(body())


def test_a_prompt_that_is_refused_for_one_picture_takes_back_the_others():
    def refuses_the_first(peer, ask, units, body):
        if not refused:
            refused.append(ask["grant_id"])
            refusal = {**ask, "reason": "request", "message": "not this one"}
            peer.send(FrameType.NOT_EMBEDDED, refusal)

    refused = []

    async def body():
        liar = Liar(refuses_the_first)
        async with liar as address, seeing(addresses=[address]) as it:
            with pytest.raises(RequestError, match="not this one"):
                await ask(it.engine, seen("a", 1, 2))
            await until(lambda: liar.aborted == ["a"])

    run(body())


def test_numbers_that_are_none_are_found_in_every_dtype():
    for dtype, bad in (("<f4", np.inf), ("<f8", np.nan)):
        good = np.ones(8, dtype)
        name = {"<f4": "float32", "<f8": "float64"}[dtype]
        assert finite(memoryview(good.tobytes()), name)
        good[3] = bad
        assert not finite(memoryview(good.tobytes()), name)
    halves = np.array([0x3F80, 0x7F7F, 0xFF7F], "<u2")
    assert finite(memoryview(halves.tobytes()), "bfloat16")
    for bits in (0x7F80, 0xFF80, 0x7FC0):
        assert not finite(memoryview(np.array([0x3F80, bits], "<u2").tobytes()), "bfloat16")


class Asking:
    """A prefill worker that this test plays."""

    def __init__(self, link):
        self.link = link

    @classmethod
    async def to(cls, worker, role="prefill"):
        return cls(await transport.connect(worker.address, identity(role), KEY))

    def ask(self, service, grant, **changes):
        made = seen("x", 1).pictures[0]
        body = {
            "rid": "r", "attempt": 1, "grant_id": grant, "epoch": service.epoch,
            "version": FORM.version, "width": SIDE, "height": SIDE, "tokens": made.length,
            "digest": made.digest, "salt": "", "alone": False,
        }  # fmt: skip
        self.link.send(FrameType.ENCODE, {**body, **changes})

    def send_pixels(self, grant, data):
        body = {"rid": "r", "attempt": 1, "grant_id": grant, "data": data}
        self.link.send(FrameType.PICTURE_PIXELS, body)

    async def next(self, *kinds):
        while True:
            frame = await self.link.receive()
            assert frame is not None, "the worker closed the connection"
            if frame.type not in (FrameType.HEARTBEAT, FrameType.SHARED, FrameType.UNIT):
                assert frame.type in kinds, FrameType(frame.type).name
                return frame.body()


def test_what_an_encode_worker_is_asked_is_checked_before_it_costs():
    async def body():
        worker = await start_worker(EncodeService(ToyEncoder(), KEY, identity=SAME))
        service, prefill = worker.service, await Asking.to(worker)
        wrong = {
            "stale": {"epoch": 1},
            "version": {"version": "another"},
            "request": {"tokens": 3},
        }
        for number, (reason, changes) in enumerate(wrong.items()):
            prefill.ask(service, number, **changes)
            said = await prefill.next(FrameType.NOT_EMBEDDED)
            assert (said["grant_id"], said["reason"]) == (number, reason)
        prefill.ask(service, 3, width=14_000_000, height=14_000_000, tokens=10**12)
        assert "at most 64 tokens" in (await prefill.next(FrameType.NOT_EMBEDDED))["message"]
        # A field that is none fails its own request.
        prefill.ask(service, 4, width="wide")
        assert (await prefill.next(FrameType.ABORT))["reason"] == "request"
        assert service.load()[1]["encode_pixel_bytes_held"] == 0
        # Pixels that are others than the digest says, or more of them.
        for grant, data in ((5, pixels(2)), (6, pixels(1) + b"x")):
            prefill.ask(service, grant)
            await prefill.next(FrameType.PIXELS_WANTED)
            prefill.send_pixels(grant, data)
            said = await prefill.next(FrameType.NOT_EMBEDDED)
            assert (said["grant_id"], said["reason"]) == (grant, "request")
        # Who waits behind a liar sends its own.
        other = await Asking.to(worker)
        prefill.ask(service, 7)
        await prefill.next(FrameType.PIXELS_WANTED)
        other.ask(service, 8)
        await until(lambda: service.unfinished() == 2)
        prefill.send_pixels(7, pixels(2))
        await prefill.next(FrameType.NOT_EMBEDDED)
        await other.next(FrameType.PIXELS_WANTED)
        other.send_pixels(8, pixels(1))
        assert (await other.next(FrameType.EMBEDDED))["cached"] is False
        # And one that goes while it sends is not waited for.
        third = await Asking.to(worker)
        digest = picture_digest(SIDE, SIDE, pixels(3))
        third.ask(service, 9, digest=digest)
        await third.next(FrameType.PIXELS_WANTED)
        third.send_pixels(9, pixels(3)[:100])
        other.ask(service, 10, digest=digest)
        await until(lambda: service.unfinished() == 2)
        third.link.close()
        await other.next(FrameType.PIXELS_WANTED)
        other.send_pixels(10, pixels(3))
        await other.next(FrameType.EMBEDDED)
        # A decode worker has nothing to ask here.
        decode = await Asking.to(worker, "decode")
        decode.ask(service, 1)
        assert await decode.link.receive() is None
        for one in (prefill, other, decode):
            one.link.close()
        await until(lambda: not service.unfinished())
        await worker.end()

    run(body())


def test_pictures_and_embeddings_are_sealed_on_their_way():
    cat = seen("a", 1)
    spied = bytearray()

    async def body():
        async def relay(reader, writer):
            up = await asyncio.open_connection(*transport.parse_address(target[0]))

            async def pump(source, sink):
                try:
                    while data := await source.read(65536):
                        spied.extend(data)
                        sink.write(data)
                finally:
                    sink.close()

            tasks = [asyncio.create_task(pump(*p)) for p in ((reader, up[1]), (up[0], writer))]
            relays.extend(tasks)

        relays, target = [], [""]
        service = EncodeService(ToyEncoder(), KEY, identity=SAME)
        service.units.shares_memory = False
        worker = await start_worker(service)
        target[0] = worker.address
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        between = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with seeing(addresses=[between]) as it:
            await ask(it.engine, cat)
            rows = bytes(rows_of(cat.pictures[0]))
            assert len(spied) > PIXELS + len(rows)
            assert b"public_key" in spied
            for secret in (cat.pictures[0].pixels[:64], rows[:32], cat.pictures[0].digest, KEY):
                assert secret not in spied
            with pytest.raises(TransferError):
                await transport.connect(worker.address, identity("prefill"), b"of another cluster")
        server.close()
        await worker.end()
        for task in relays:
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)

    run(body())
