"""Encode workers hold no more than they may, and nothing that nobody wants."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from seeing_cluster import expected, seeing
from seeing_toy import (
    FORM,
    PIXELS,
    SICK,
    ToyEncoder,
    seen,
)
from toy_engine import ask, run, until

from deepinfer_engine.errors import RequestError
from deepinfer_engine.pd.encode_queue import EncodeQueue, Waiting
from deepinfer_engine.pd.pictures import _Room
from deepinfer_engine.pd.rows import RowCache


@pytest.fixture
def stands_still(monkeypatch):
    """What failed is tried again at once."""
    monkeypatch.setattr("deepinfer_engine.pd.pictures.BUSY_S", 0.01)


def test_an_abort_reaches_the_queue_of_the_encode_worker():
    first, second, third = seen("a", 1), seen("b", 2), seen("c", 2, 3)
    (tokens,) = expected(third)

    async def body():
        encoder = ToyEncoder(hold=True)
        async with seeing(encoder) as it:
            runs = asyncio.create_task(ask(it.engine, first))
            await until(encoder.entered.is_set)
            waits = asyncio.create_task(ask(it.engine, second))
            await until(lambda: it.gauges()["encode_waiting"] == 1)
            also = asyncio.create_task(ask(it.engine, third))
            await until(lambda: it.gauges()["encode_waiting"] == 2)
            runs.cancel()
            waits.cancel()
            # What the third wants too stays; the pass that runs is nobody's any more.
            await until(lambda: it.encode().unfinished() == 2)
            assert it.gauges()["encode_waiting"] == 2
            also.cancel()
            await until(lambda: it.encode().unfinished() == 0)
            assert it.gauges()["encode_waiting"] == 0
            await until(lambda: it.prefills[0].service.unfinished() == 0)
            encoder.gate.set()
            again = await ask(it.engine, replace(third, request_id="d"))
            assert again.tokens == tokens
            assert it.counters()["encode_pictures"] == 3  # the first, whose pass ran, and these

    run(body())


def test_what_waits_at_an_encode_worker_is_bounded_in_all_and_by_key(stands_still):
    mine = [seen(f"m{i}", i, salt="mine") for i in range(4)]
    other = seen("o", 9, salt="other")
    tokens = expected(*mine, other)

    async def body():
        encoder = ToyEncoder(hold=True)
        async with seeing(encoder, pixel_bytes=4 * PIXELS, cache_bytes=0) as it:
            asked = [asyncio.create_task(ask(it.engine, one)) for one in mine]
            await until(encoder.entered.is_set)
            await until(lambda: it.counters()["encode_refused"] > 2)
            assert it.gauges()["encode_pixel_bytes_held"] == 2 * PIXELS  # half is one key's
            asked.append(asyncio.create_task(ask(it.engine, other)))
            await until(lambda: it.gauges()["encode_pixel_bytes_held"] == 3 * PIXELS)
            encoder.gate.set()
            assert [(await one).tokens for one in asked] == tokens
            assert it.gauges()["encode_cache_bytes"] == 0

    run(body())


def test_memory_for_embeddings_is_bounded_on_both_sides():
    cats = [seen(f"r{i}", i) for i in range(4)]
    size = cats[0].pictures[0].length * FORM.row_bytes
    tokens = expected(*cats)

    async def body():
        encoder = ToyEncoder(hold=True)
        async with seeing(encoder, cache_bytes=2 * size) as it:
            client = it.prefills[0].service.pictures
            client._room = _Room(size)
            client.cache = RowCache(size)
            asked = [asyncio.create_task(ask(it.engine, one)) for one in cats]
            await until(encoder.entered.is_set)
            await until(lambda: len(client._room._queue) == 3)  # one at a time
            assert client.gauges()["picture_bytes_held"] == size
            assert it.counters()["encode_pictures_asked"] == 1
            encoder.gate.set()
            assert [(await one).tokens for one in asked] == tokens
            assert it.gauges()["encode_cache_bytes"] == 2 * size
            assert client.cache.nbytes == size
            with pytest.raises(RequestError, match="bytes of embeddings, and a prefill worker"):
                await ask(it.engine, seen("two", 1, 2))

    run(body())


def test_pictures_of_several_requests_go_through_one_pass_within_its_patches():
    encoder = ToyEncoder()
    done = []
    queue = EncodeQueue(
        encoder, done=lambda w, rows: done.append(w), failed=lambda w, text: None, patches=100
    )

    def put(key, seed, alone=False):
        made = seen("x", seed).pictures[0]  # 36 patches
        waiting = Waiting(made, key, alone)
        queue.put(waiting)
        return waiting

    a1, a2, a3 = (put("a", i) for i in range(3))
    b1 = put("b", 4)
    suspect = put("c", 5, alone=True)
    steps = []
    while queue.step(0.0) is not None:
        steps.append(done[sum(map(len, steps)) :])
    # Keys take turns; two fit, a third would be over a hundred; a suspect goes alone.
    assert steps == [[a1, b1], [suspect], [a2, a3]]
    assert encoder.batches == [2, 1, 2]
    assert queue.step(0.0) is None


def test_one_that_cannot_be_encoded_fails_alone():
    done, failed = [], []
    queue = EncodeQueue(
        ToyEncoder(),
        done=lambda w, rows: done.append(w),
        failed=lambda w, text: failed.append((w, text)),
    )
    good, sick, other = (
        Waiting(seen("x", i, mark=mark).pictures[0], "", alone=False)
        for i, mark in enumerate((b"", SICK, b""))
    )
    for one in (good, sick, other):
        queue.put(one)
    assert queue.step(0.0) == 3
    assert done == [good, other]
    assert failed == [(sick, "ValueError: this picture cannot be encoded")]
    assert (queue.encoded, queue.failures, queue.waiting) == (2, 1, 0)
