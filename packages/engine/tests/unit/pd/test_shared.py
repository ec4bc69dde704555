"""Units through shared memory: room, places, and what happens where it cannot be."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import BLOCK, alone, ask, cluster, greedy, prompt, request, run, toy, until

from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import rings, shared
from deepinfer_engine.pd.shared import MARK_BYTES, ReceiveRing, SendRing, place_of
from deepinfer_engine.pd.wire import UnitHeader, unit_digest

LONG = 9 * BLOCK + 3


class Peer:
    """The connection of a ring, and what was announced on it."""

    closed = False

    def __init__(self):
        self.told = []

    def send_raw(self, kind, body):
        self.told.append(place_of(memoryview(body)))


def header(number, size, data=b""):
    return UnitHeader(1, 1, 0, number, 0, 1, 0, 1, size, unit_digest([memoryview(data)]))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), max_size=30), reads=st.lists(st.integers(0, 3), max_size=30)
)
def test_units_that_are_not_read_keep_their_place(sizes, reads):
    """Each waits for room; none is written over another that decode has not read."""

    async def body():
        peer, given = Peer(), iter(reads)
        ring = SendRing(peer, 64)
        other = ReceiveRing(ring.offer())
        read = 0
        contents = []
        for number, size in enumerate(sizes):
            data = bytes([number + 1]) * size
            contents.append(data)
            sending = asyncio.ensure_future(ring.send(header(number, size), [memoryview(data)]))
            await asyncio.sleep(0)
            while not sending.done() or next(given, 0):
                if read == len(peer.told):
                    break
                told, start = peer.told[read]
                with other.payload(told, start) as payload:
                    assert bytes(payload) == contents[read]
                read += 1
                ring.read(read)
                await asyncio.sleep(0)
            await sending
        for told, start in peer.told[read:]:
            with other.payload(told, start) as payload:
                assert bytes(payload) == contents[told.unit]
        with pytest.raises(TransferError, match="were read of"):
            ring.read(len(peer.told) + 1)
        other.close()
        ring.close()

    run(body())


def test_who_waits_for_room_when_decode_goes_is_told():
    async def body():
        peer = Peer()
        ring = SendRing(peer, 64)
        data = memoryview(bytes(60))
        await ring.send(header(0, 60), [data])
        waiting = asyncio.ensure_future(ring.send(header(1, 60), [data]))
        await asyncio.sleep(0)
        peer.closed = True
        ring.close()
        with pytest.raises(ConnectionResetError):
            await waiting

    run(body())


def test_decode_opens_only_the_ring_that_was_meant(tmp_path):
    async def body():
        ring = SendRing(Peer(), 64)
        offer = ring.offer()
        pipe, _ = os.pipe()
        file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.truncate(file, MARK_BYTES + 64)
        for change in (
            {"mark": bytes(32)},
            {"size": 32},
            {"size": 0},
            {"size": 1 << 40},
            {"fd": 1 << 20},
            {"fd": pipe},
            {"fd": file},
            {"pid": 1 << 22},
        ):
            with pytest.raises(TransferError):
                ReceiveRing({**offer, **change})
        with ReceiveRing(offer).payload(header(0, 64), 0) as payload:
            assert len(payload) == 64
        with pytest.raises(TransferError, match="outside"):
            ReceiveRing(offer).payload(header(0, 64), 1)
        ring.close()

    run(body())


def test_another_process_reads_what_was_put_there():
    script = (
        "import sys, json; from deepinfer_engine.pd.shared import ReceiveRing; "
        "o = json.loads(sys.argv[1]); o['mark'] = bytes.fromhex(o['mark']); r = ReceiveRing(o); "
        "print(bytes(r._view[32:42]))"
    )

    async def body():
        import json

        ring = SendRing(Peer(), 64)
        await ring.send(header(0, 10), [memoryview(b"0123456789")])
        offer = {**ring.offer(), "mark": ring.offer()["mark"].hex()}
        command = [sys.executable, "-c", script, json.dumps(offer)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "b'0123456789'"
        ring.close()

    run(body())


def bytes_of(it):
    counters = [w.service.extra_counters() for w in it.prefills]
    return [sum(c[name] for c in counters) for name in ("transfer_bytes", "transfer_shared_bytes")]


def test_prompts_go_through_shared_memory_and_say_what_they_say_alone(monkeypatch):
    """With a ring so small that units wait for one another."""
    unit = toy().layout.block_bytes
    monkeypatch.setattr("deepinfer_engine.pd.sending.UNIT_BYTES", unit)
    room = 3 * max(unit, toy().layout.state_bytes)
    monkeypatch.setattr(SendRing.__init__, "__defaults__", (room,))

    async def body():
        async with cluster(prefills=2, decodes=2) as it:
            names = [f"r{i}" for i in range(12)]
            answers = await asyncio.gather(
                *(ask(it.engine, request(n, prompt(i, LONG + i))) for i, n in enumerate(names))
            )
            for i, answer in enumerate(answers):
                assert answer.tokens == alone(prompt(i, LONG + i), greedy())
            sent, through = bytes_of(it)
            assert sent == through > 0
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("why", ["not wanted", "decode cannot open it", "no memfd"])
def test_where_memory_cannot_be_shared_units_go_over_the_socket(why, monkeypatch):
    def refuse(*_args, **_more):
        raise TransferError("another machine") if why == "decode cannot open it" else OSError(why)

    async def body():
        async with cluster() as it:
            if why == "not wanted":
                it.prefills[0].service.units.shares_memory = False
            for link in it.prefills[0].service._decodes.values():
                (await link).close()  # made for the probe; the next one is made anew
            await until(lambda: not it.prefills[0].service.units._rings)
            answer = await ask(it.engine, request("r", prompt(1, LONG)))
            assert answer.tokens == alone(prompt(1, LONG), greedy())
            sent, through = bytes_of(it)
            assert sent > 0
            assert through == 0
            await until(it.idle)

    if why == "decode cannot open it":
        monkeypatch.setattr(rings, "ReceiveRing", refuse)
    elif why == "no memfd":
        monkeypatch.setattr(shared.os, "memfd_create", refuse)
    run(body())


def test_a_unit_at_a_place_outside_ends_the_connection_and_its_request_is_tried_again(monkeypatch):
    lies = iter([True])
    send = SendRing.send

    async def lying(self, header, views):
        if next(lies, False):
            self._connection.send_raw(
                shared.FrameType.UNIT_AT, header.pack() + (1 << 50).to_bytes(8, "little")
            )
            return True
        return await send(self, header, views)

    monkeypatch.setattr(SendRing, "send", lying)

    async def body():
        async with cluster(decodes=2) as it:
            answer = await ask(it.engine, request("r", prompt(1, LONG)))
            assert answer.tokens == alone(prompt(1, LONG), greedy())
            await until(it.idle)

    run(body())
