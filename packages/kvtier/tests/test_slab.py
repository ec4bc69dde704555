from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.host.memory import Slab, gather, scatter


@pytest.mark.parametrize("nbytes", [1, 64, 5_000, 113_920])
@given(st.permutations(range(6)), st.integers(0, 6), st.booleans())
def test_gather_and_scatter_agree_with_a_loop(nbytes, order, count, padded):
    slab = Slab(nbytes, 6)
    slots = np.array(order[:count], dtype=np.int64)
    source = np.random.default_rng(count).integers(0, 256, (count, nbytes), dtype=np.uint8)
    if count:
        scatter(source, slab, slots)
        for i, slot in enumerate(slots):
            assert np.array_equal(slab.row(int(slot)), source[i])
        target = np.zeros((count, nbytes + 7 * padded), dtype=np.uint8)
        gather(slab, slots, target[:, :nbytes])
        assert np.array_equal(target[:, :nbytes], source)
        assert not target[:, nbytes:].any()


def test_memory_of_a_released_slot_goes_back_and_comes_again_as_zeros():
    slab = Slab(1 << 20, 3)
    slots = [slab.take_cold() for _ in range(3)]
    assert slab.take_cold() is None
    slab.rows[:] = 7
    slab.give(slots[1])
    slab.release_warm()
    assert (slab.row(0) == 7).all()
    assert (slab.row(2) == 7).all()
    assert slab.take_cold() == slots[1]
    assert not slab.row(1).any()


def test_a_batch_of_blocks_lies_in_consecutive_slots(make_model):
    with kvtier.open(host_bytes=1 << 20) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 20)
        model.store(tokens)
        with model.ns.match(tokens, want=("block",)) as match:
            assert np.array_equal(np.diff(match.slots()), np.ones(19))


def test_memory_of_one_size_serves_another_when_it_is_needed(make_model):
    """Two layouts share the capacity, whichever came first."""
    with kvtier.open(host_bytes=100_000) as cache:
        big = make_model(cache)
        small = cache.namespace(
            kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 1_000))}), model="small"
        )
        tokens = big.prompt(1, 20)
        big.store(tokens)
        digests = small.match(tokens).digests
        for start in range(0, 20, 5):
            some = digests[start : start + 5]
            small.put(some, np.full((5, 1_000), start, np.uint8), parents=digests[0])
        assert small.match(tokens).block_prefix == 20
        assert 0 < big.block_hits(tokens) < 20
        big.store(tokens)
        cache.host.audit()


def test_a_view_shows_the_block_in_place_and_cannot_be_written(make_model):
    with kvtier.open(host_bytes=1 << 20) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens)
        match = model.ns.match(tokens, want=("block",))
        loaded = np.zeros((3, 5_000), np.uint8)
        model.ns.load(match, dst=loaded, wait=True)
        views = match.views()
        assert [bytes(view) for view in views] == [row.tobytes() for row in loaded]
        with pytest.raises(TypeError):
            views[0][0] = 1
        match.release()
        assert match.views() == [None, None, None]


def test_a_load_that_runs_keeps_the_pins_of_a_lease_that_ends(make_model):
    with kvtier.open(host_bytes=20_000) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4)
        model.store(tokens)
        match = model.ns.match(tokens, want=("block",))
        assert cache.leases.hold(match.lease)
        match.release()
        model.store(model.prompt(2, 4))
        assert cache.host.pins() == 4, "nothing of it may be evicted"
        cache.leases.unhold(match.lease)
        assert cache.host.pins() == 0
        assert not cache.leases.hold(match.lease)
