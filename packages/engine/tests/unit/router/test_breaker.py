"""When a worker that fails is left alone, and how much may be tried again."""

from __future__ import annotations

import asyncio

import pytest
from toy_engine import alone, ask, cluster, gated, greedy, prompt, request, run, until

from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.router.breaker import (
    BUDGET_BURST,
    CONSECUTIVE,
    FIRST_OPEN_S,
    MOST_OPEN_S,
    WINDOW,
    Breaker,
    RetryBudget,
)


class Hand:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Hand()


@pytest.fixture
def breaker(clock):
    return Breaker(clock)


def fail(breaker, times=CONSECUTIVE):
    for _ in range(times):
        breaker.begin()
        breaker.failed()


def test_five_failures_in_a_row_open_it_and_a_success_between_does_not(breaker):
    fail(breaker, CONSECUTIVE - 1)
    breaker.begin()
    breaker.succeeded()
    fail(breaker, CONSECUTIVE - 1)
    assert breaker.state == "closed"
    assert breaker.allows()
    fail(breaker, 1)
    assert breaker.state == "open"
    assert not breaker.allows()


def test_more_than_half_of_the_last_twenty_open_it(breaker):
    for number in range(WINDOW - 1):
        assert breaker.allows()
        fail(breaker, 1) if number % 2 else breaker.succeeded()
    fail(breaker, 1)
    assert breaker.state == "closed", "half of them is not more than half"
    fail(breaker, 1)
    assert breaker.state == "open"


def test_after_its_time_one_request_tries_and_its_end_decides(breaker, clock):
    fail(breaker)
    clock.now += FIRST_OPEN_S - 0.1
    assert not breaker.allows()
    clock.now += 0.1
    assert breaker.state == "half-open"
    assert breaker.allows()
    breaker.begin()
    assert not breaker.allows(), "one at a time"
    breaker.gave_nothing_away()
    assert breaker.allows(), "the client left: the next one tries"
    breaker.begin()
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_each_failed_try_doubles_the_wait_up_to_a_minute(breaker, clock):
    fail(breaker)
    wait = FIRST_OPEN_S
    for _ in range(6):
        clock.now += wait
        assert breaker.allows()
        fail(breaker, 1)
        wait = min(2 * wait, MOST_OPEN_S)
        clock.now += wait - 0.1
        assert not breaker.allows()
        clock.now += 0.1
        assert breaker.allows()
        clock.now -= wait
    assert wait == MOST_OPEN_S


def test_a_worker_that_was_replaced_starts_anew(breaker):
    fail(breaker)
    breaker.reset()
    assert breaker.state == "closed"
    fail(breaker, CONSECUTIVE - 1)
    assert breaker.allows()


def test_a_tenth_of_the_requests_may_be_tried_again_and_a_burst():
    budget = RetryBudget()
    assert sum(budget.spend() for _ in range(2 * BUDGET_BURST)) == BUDGET_BURST
    for _ in range(1000):
        budget.earn()
    assert sum(budget.spend() for _ in range(1000)) in (99, 100)  # sums of tenths


def test_a_worker_whose_breaker_is_open_gets_no_requests_and_says_so():
    async def body():
        async with cluster(decodes=2) as it:
            while await it.engine.problems():
                await it.engine._changed.wait()
            bad = next(link for link in it.engine._links.values() if link.role == "decode")
            fail(bad.breaker)
            for number in range(4):
                tokens = prompt(number, 20)
                answer = await ask(it.engine, request(f"r{number}", tokens))
                assert answer.tokens == alone(tokens, greedy())
            assert bad.requests == 0
            status = {s.name: s for s in await it.engine.status()}
            assert status[bad.address].gauges["router_breaker_open"] == 1.0

    run(body())


def test_without_a_retry_left_a_lost_worker_is_told_at_once():
    async def body():
        async with cluster(prefills=2, prefill_runner=gated) as it:
            it.engine._budget._left = 0.0
            for worker in it.prefills:
                worker.service.runner.gate.clear()
            task = asyncio.create_task(ask(it.engine, request("r", prompt(1, 20))))
            await until(lambda: any(w.service.unfinished() for w in it.prefills))
            (victim,) = [w for w in it.prefills if w.service.unfinished()]
            for peer in list(victim.service.peers):
                peer.close()
            with pytest.raises(EngineUnavailable):
                await task
            for worker in it.prefills:
                worker.service.runner.gate.set()
            await until(it.idle)

    run(body())
