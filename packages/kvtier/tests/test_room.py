"""Loads need no room in host memory: what is full of leases is gone past, at once."""

from __future__ import annotations

import numpy as np
import pytest

import deepinfer_kvtier as kvtier

BLOCK_BYTES = 5_000


@pytest.fixture
def crowded(store, make_model):
    """Host memory for eight blocks, all of them leased, and a prompt of twelve on disk only."""
    with kvtier.open(store) as cache:
        model = make_model(cache)
        wanted = model.prompt(1, 12)
        assert model.store(wanted, durability="flushed").wait(60)
    with kvtier.open(store, host_bytes=8 * BLOCK_BYTES, state_share=0) as cache:
        model = make_model(cache)
        hot = model.prompt(2, 8)
        assert model.store(hot, durability="flushed").wait(60)
        cache.flush()
        lease = model.ns.match(hot, want=("block",))
        assert {span.tier for span in lease.spans} == {"host"}
        yield cache, model, wanted
        lease.release()
        assert model.load_all(hot) == (8, 8)


def test_a_load_goes_past_memory_that_is_leased_to_the_last_byte(crowded):
    cache, model, wanted = crowded
    assert model.load_all(wanted) == (12, 12)
    with model.ns.match(wanted, want=("block",)) as match:
        assert {span.tier for span in match.spans} == {"disk"}, "nothing leased made room for it"
    assert cache.host.usage()["no_room"] > 0


def test_a_put_goes_past_it_too(crowded, make_model):
    _, model, _ = crowded
    tokens = model.prompt(3, 4)
    assert model.store(tokens, durability="flushed").wait(60)
    assert model.load_all(tokens) == (4, 4)


def test_readers_that_share_a_read_nobody_has_room_for_each_get_the_bytes(crowded):
    _, model, wanted = crowded
    matches = [model.ns.match(wanted, want=("block",)) for _ in range(4)]
    rooms = [np.zeros((12, BLOCK_BYTES), np.uint8) for _ in matches]
    jobs = [model.ns.load(m, dst=room) for m, room in zip(matches, rooms, strict=True)]
    for match, room, job in zip(matches, rooms, jobs, strict=True):
        assert model.check(match, job.wait(), room) == 12
        match.release()
