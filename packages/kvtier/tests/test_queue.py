from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.timing import Breaker
from deepinfer_kvtier.flow.write_queue import queue_refusal
from deepinfer_kvtier.testing import ManualClock, payload_of

BLOCK_BYTES = 5_000


@pytest.mark.parametrize(
    ("filled", "cls", "continues", "expected"),
    [
        (70, "scratch", False, None),
        (80, "scratch", False, "class_pressure"),
        (80, "chat", False, None),
        (95, "chat", False, "queue_full"),
        (95, "chat", True, None),
        (101, "chat", True, "queue_full"),
    ],
)
def test_pressure_refuses_the_least_valuable_first(filled, cls, continues, expected):
    assert (
        queue_refusal(queued_bytes=filled - 1, limit=100, nbytes=1, cls=cls, continues=continues)
        == expected
    )


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from(["chat", "scratch"]))
def test_the_queue_never_takes_more_than_its_limit(queued, nbytes, cls):
    refused = queue_refusal(queued_bytes=queued, limit=100, nbytes=nbytes, cls=cls, continues=True)
    assert (refused is None) <= (queued + nbytes <= 100)


def test_a_second_put_of_a_waiting_block_waits_with_the_first(store, make_model):
    with kvtier.open(store, commit_delay_s=30) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        first = model.store(tokens, durability="flushed")
        second = model.store(tokens, durability="flushed")
        assert not first.done
        assert not second.done
        assert cache.queue.queued_bytes == 2 * BLOCK_BYTES
        cache.flush()
        assert first.wait(60)
        assert second.wait(60)
        assert cache.stats()["disk"]["written_payload_bytes"] == 2 * BLOCK_BYTES


def test_fsync_durability_is_reported_after_a_sync(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 2), durability="fsync").wait(60)
        assert cache.flush(fsync=True).done


def test_a_duplicate_in_one_call_is_refused_and_the_rest_is_stored(model):
    digest = model.digests(model.prompt(1, 1))[0]
    block = payload_of(digest, BLOCK_BYTES)
    ticket = model.ns.put([digest, digest], [block, block])
    assert ticket.reasons == (None, "duplicate_in_call")


def test_records_reach_the_directory_without_any_room_in_memory(store, make_model, check_leaks):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4)
        for copy in (True, False):
            digests = model.digests(tokens)
            source = [payload_of(d, BLOCK_BYTES) for d in digests]
            assert model.ns.put(digests, source, copy=copy, durability="flushed").wait(60)
            assert model.load_all(tokens) == (4, 4)
            tokens = model.prompt(2, 4)
        check_leaks(cache)


def test_flush_reports_what_still_waits(store, make_model):
    with kvtier.open(store, commit_delay_s=30) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 1))
        assert cache.flush().done
        assert cache.flush() == kvtier.FlushReport(True, 0, 0)


def test_a_breaker_opens_after_a_burst_and_half_opens_later():
    clock = ManualClock()
    breaker = Breaker(clock)
    for _ in range(4):
        breaker.error()
    assert not breaker.is_open
    breaker.error()
    assert breaker.is_open
    clock.advance(10)
    assert not breaker.is_open
    breaker.error()
    assert breaker.is_open, "one failed probe opens it again"
    clock.advance(10)
    breaker.success()
    breaker.error()
    assert not breaker.is_open


def test_errors_that_are_far_apart_do_not_open_a_breaker():
    clock = ManualClock()
    breaker = Breaker(clock)
    for _ in range(20):
        breaker.error()
        clock.advance(3)
    assert not breaker.is_open
