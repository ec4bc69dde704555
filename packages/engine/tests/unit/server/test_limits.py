"""Body size, places, and what draining waits for."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import FakeClock

from deepinfer_engine.codec.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    Draining,
    LimitExceeded,
)
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.server.limits import (
    MAX_JSON_MARKS,
    BodyLimit,
    ByteBudget,
    FairSlots,
    Gate,
    Rates,
    check_declared_length,
    read_body,
    request_id,
)


def arriving(parts):
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)}
        for i, part in enumerate(parts)
    ]
    feed = iter(messages)

    async def receive():
        return next(feed)

    return receive, feed


def read(receive, size, budget=None):
    async def go():
        with (budget or ByteBudget(1 << 30, "bodies")).holding(None) as held:
            body = await read_body(receive, BodyLimit(size), held)
            assert held.size == len(body)
            return body

    return asyncio.run(go())


def test_a_body_in_parts_is_put_together():
    receive, _ = arriving([b"ab", b"", b"c"])
    assert read(receive, 3) == b"abc"


def test_reading_stops_at_the_limit_and_not_at_the_end():
    receive, rest = arriving([b"ab", b"cd", b"ef"])
    with pytest.raises(BodyTooLarge):
        read(receive, 3)
    assert len(list(rest)) == 1


def test_a_declared_length_over_the_limit_is_refused_unread():
    check_declared_length("3", BodyLimit(3))
    check_declared_length(None, BodyLimit(3))
    with pytest.raises(BodyTooLarge, match="4 bytes"):
        check_declared_length("4", BodyLimit(3))
    with pytest.raises(ContextLengthExceeded, match="context of 8 tokens"):
        check_declared_length("4", BodyLimit(3, context=8))
    with pytest.raises(BodyTooLarge):
        check_declared_length("9" * 10_000, BodyLimit(3))


def test_bodies_together_are_bounded_and_what_was_read_is_given_back():
    budget = ByteBudget(4, "bodies")
    with budget.holding(None, 2):
        receive, rest = arriving([b"ab", b"cd", b"ef"])
        with pytest.raises(EngineUnavailable, match="4 of 4"):
            read(receive, 100, budget)
        assert len(list(rest)) == 1
    assert budget.held == 0


def test_one_key_fills_its_own_share_of_the_bytes_alone():
    budget = ByteBudget(10, "bodies", share=0.5)
    with budget.holding("a", 4):
        with pytest.raises(LimitExceeded, match="this key"), budget.holding("a", 2):
            pass
        with budget.holding("b", 5):
            assert budget.held == 9
    with pytest.raises(BodyTooLarge), budget.holding("a", 6):
        pass
    assert (budget.held, dict(budget._by_key)) == (0, {})


def test_a_body_of_nothing_but_small_values_is_refused_before_it_is_parsed():
    receive, _ = arriving([b"[" + b"0," * MAX_JSON_MARKS + b"0]"])
    with pytest.raises(BodyTooLarge, match="JSON values"):
        read(receive, 1 << 30)


def test_costly_work_goes_round_by_key():
    order = []

    async def go():
        slots = FairSlots(1)

        async def work(key, number):
            async with slots.hold(key):
                order.append((key, number))
                await asyncio.sleep(0)

        many = [asyncio.create_task(work("a", n)) for n in range(4)]
        await asyncio.sleep(0)
        other = asyncio.create_task(work("b", 0))
        await asyncio.gather(*many, other)

    asyncio.run(go())
    assert order.index(("b", 0)) <= 2
    assert [n for key, n in order if key == "a"] == [0, 1, 2, 3]


def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next():
    async def go():
        slots = FairSlots(1)
        reached = []

        async def work(key):
            async with slots.hold(key):
                reached.append(key)

        async with slots.hold("a"):
            left, stays = asyncio.create_task(work("b")), asyncio.create_task(work("c"))
            await asyncio.sleep(0)
            left.cancel()
        # The turn was given to the one that leaves in this very moment.
        await asyncio.wait({left, stays})
        assert reached == ["c"]
        assert slots._free == 1
        assert not slots._running

    asyncio.run(go())


def test_requests_a_minute_of_one_key_do_not_touch_another():
    clock = FakeClock()
    rates = Rates(requests=2, tokens=None, clock=clock)
    rates.take("a")
    rates.take("a")
    with pytest.raises(LimitExceeded, match="2 requests a minute") as refused:
        rates.take("a")
    assert refused.value.retry_after_s == pytest.approx(30)
    rates.take("b")
    clock.now += 30
    rates.take("a")


def test_tokens_are_charged_when_they_are_known_and_debt_is_waited_off():
    clock = FakeClock()
    rates = Rates(requests=None, tokens=60, clock=clock)
    rates.take("a")
    rates.charge("a", 100)
    with pytest.raises(LimitExceeded, match="60 tokens") as refused:
        rates.take("a")
    assert refused.value.retry_after_s == pytest.approx(41)
    clock.now += 41
    rates.take("a")


def test_what_is_left_stands_in_the_headers_of_each_protocol():
    clock = FakeClock()
    rates = Rates(requests=2, tokens=None, clock=clock)
    rates.take("a")
    assert rates.headers("a", "chat") == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30.000s",
    }
    assert rates.headers("a", "messages") == {
        "anthropic-ratelimit-requests-limit": "2",
        "anthropic-ratelimit-requests-remaining": "1",
    }


def test_a_key_over_its_share_gets_429_while_others_still_enter():
    gate = Gate(total=10, per_caller=1)
    with gate.enter("a"):
        with pytest.raises(LimitExceeded), gate.enter("a"):
            pass
        with gate.enter("b"):
            assert gate.in_flight == 2
    with gate.enter("a"):
        assert gate.in_flight == 1


def test_the_total_counts_everybody_and_is_an_overload():
    gate = Gate(total=1, per_caller=9)
    with gate.enter(None), pytest.raises(EngineUnavailable), gate.enter("a"):
        pass


def test_an_open_server_has_no_share_per_caller():
    gate = Gate(total=3, per_caller=1)
    with gate.enter(None), gate.enter(None):
        assert gate.in_flight == 2


def test_draining_refuses_new_requests_and_waits_for_the_old():
    async def go():
        gate = Gate(5, 5)
        with gate.enter("a"):
            drained = asyncio.ensure_future(gate.drain(60))
            await asyncio.sleep(0)
            with pytest.raises(Draining), gate.enter("a"):
                pass
            assert not drained.done()
        assert await drained

    asyncio.run(go())


def test_after_the_drain_time_those_inside_are_told_to_end():
    async def go():
        gate = Gate(5, 5)
        with gate.enter("a"):
            told = asyncio.ensure_future(gate.ending())
            assert not await gate.drain(0)
            await told

    asyncio.run(go())


@given(st.text(max_size=200))
def test_a_request_id_is_always_well_formed(offered):
    got = request_id(offered)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,128}", got)
    assert got == offered or not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", offered)


@given(st.lists(st.sampled_from(["a", "b", None]), max_size=30))
def test_places_always_return_to_zero(callers):
    gate = Gate(total=8, per_caller=3)
    held = []
    for caller in callers:
        context = gate.enter(caller)
        try:
            context.__enter__()
        except (LimitExceeded, EngineUnavailable):
            continue
        held.append(context)
    assert gate.in_flight == len(held)
    for context in held:
        context.__exit__(None, None, None)
    assert gate.in_flight == 0
