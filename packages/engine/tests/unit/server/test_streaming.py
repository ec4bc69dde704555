"""Keep-alives, deadlines and leaving clients, on a clock that only the test moves."""

from __future__ import annotations

import asyncio

import pytest
from server_fakes import FakeClock, settle

from deepinfer_engine.codec.errors import Draining
from deepinfer_engine.codec.protocol import WireEvent
from deepinfer_engine.server.streaming import AnswerWriter, ClientGone, Deadline, Timing, watch

TIMING = Timing(silence_first=5, silence=10, first_token=600, between_tokens=120, slow_reader=60)
BATCH = [WireEvent(None, "{}")]


class Bench:
    """A `watch` over a generator that the test feeds; `seen` is what it yielded."""

    def __init__(self, timing: Timing = TIMING) -> None:
        self.clock = FakeClock()
        self.feed: asyncio.Queue[object] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.gone, self.ending = loop.create_future(), loop.create_future()
        self.seen: list[object] = []
        self.closed = False
        self.task = asyncio.ensure_future(self._run(timing))

    async def _events(self):
        try:
            while (item := await self.feed.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True

    async def _run(self, timing):
        async for item in watch(self._events(), self.gone, self.ending, self.clock, timing):
            self.seen.append("keep-alive" if item is None else item)


def run(coroutine):
    return asyncio.run(coroutine)


def test_first_keepalive_after_five_seconds_then_every_ten():
    async def go():
        bench = Bench()
        await bench.clock.advance(4.9)
        assert bench.seen == []
        await bench.clock.advance(0.2)
        assert bench.seen == ["keep-alive"]
        await bench.clock.advance(9.8)
        assert bench.seen == ["keep-alive"]
        await bench.clock.advance(0.3)
        assert bench.seen == ["keep-alive", "keep-alive"]
        await bench.feed.put(None)
        await bench.task

    run(go())


def test_silence_is_counted_from_the_last_event():
    async def go():
        bench = Bench()
        await bench.clock.advance(3)
        await bench.feed.put(BATCH)
        await bench.clock.advance(9.9)
        assert bench.seen == [BATCH]
        await bench.clock.advance(0.2)
        assert bench.seen == [BATCH, "keep-alive"]
        bench.task.cancel()
        await settle()

    run(go())


def test_keepalives_are_not_progress_towards_the_first_token_limit():
    async def go():
        bench = Bench()
        for _ in range(61):
            await bench.clock.advance(10)
        with pytest.raises(Deadline, match="no token for 600 s"):
            await bench.task
        assert bench.closed

    run(go())


def test_a_stall_between_tokens_has_its_own_shorter_limit():
    async def go():
        bench = Bench()
        await bench.feed.put(BATCH)
        await bench.clock.advance(1)
        await bench.clock.advance(121)
        with pytest.raises(Deadline, match="no token for 120 s"):
            await bench.task

    run(go())


def test_the_requests_own_limit_ends_even_a_lively_answer():
    async def go():
        bench = Bench(Timing(5, 10, 600, 120, 60, total=2.5))
        for _ in range(3):
            await bench.feed.put(BATCH)
            await bench.clock.advance(1)
        with pytest.raises(Deadline, match=r"2\.5 s"):
            await bench.task
        assert bench.seen == [BATCH] * 3
        assert bench.closed

    run(go())


def test_a_client_that_leaves_closes_the_events_at_once():
    async def go():
        bench = Bench()
        await bench.feed.put(BATCH)
        await settle()
        bench.gone.set_result(None)
        with pytest.raises(ClientGone):
            await bench.task
        assert bench.closed

    run(go())


def test_a_writer_that_gives_up_between_two_events_closes_them_too():
    async def go():
        closed = []

        async def events():
            try:
                yield BATCH
                yield BATCH
            finally:
                closed.append(True)

        loop = asyncio.get_running_loop()
        futures = loop.create_future(), loop.create_future()
        watched = watch(events(), *futures, FakeClock(), TIMING)
        assert await anext(watched) == BATCH
        await watched.aclose()
        assert closed == [True]

    run(go())


def test_the_end_of_draining_is_told_and_closes_the_events():
    async def go():
        bench = Bench()
        await settle()
        bench.ending.set_result(None)
        with pytest.raises(Draining):
            await bench.task
        assert bench.closed

    run(go())


def test_an_error_of_the_events_passes_through():
    async def go():
        bench = Bench()
        await bench.feed.put(KeyError("boom"))
        with pytest.raises(KeyError):
            await bench.task

    run(go())


def test_a_reader_that_takes_nothing_is_given_up():
    async def go():
        async def stuck(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        writer = AnswerWriter(stuck, "chat", True, slow_reader_s=0.01)
        with pytest.raises(ClientGone) as caught:
            await writer.events(BATCH)
        assert caught.value.cause == "slow_reader"

    run(go())
