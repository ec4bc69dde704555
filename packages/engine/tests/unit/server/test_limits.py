"""Body size, places, and what draining waits for."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.codec.errors import BodyTooLarge, Draining, LimitExceeded
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.server.limits import (
    Gate,
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


def test_a_body_in_parts_is_put_together():
    receive, _ = arriving([b"ab", b"", b"c"])
    assert asyncio.run(read_body(receive, 3)) == b"abc"


def test_reading_stops_at_the_limit_and_not_at_the_end():
    receive, rest = arriving([b"ab", b"cd", b"ef"])
    with pytest.raises(BodyTooLarge):
        asyncio.run(read_body(receive, 3))
    assert len(list(rest)) == 1


def test_a_declared_length_over_the_limit_is_refused_unread():
    check_declared_length("3", 3)
    check_declared_length(None, 3)
    with pytest.raises(BodyTooLarge, match="4 bytes"):
        check_declared_length("4", 3)


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
