"""Blocks and slots: who owns them, and that none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.core.pools import BlockPool, PoolError, Pools


def test_scratch_id_zero_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.take(4) == [1, 2, 3, 4]
    assert pool.take(1) is None


def test_freed_ids_wait_behind_all_earlier_freed_ids():
    pool = BlockPool(6)
    first, second = pool.take(2), pool.take(2)
    pool.give(second)
    pool.give(first)
    # 5 was never used; then the ids in the order they were freed, each table from its end.
    assert pool.take(5) == [5, second[1], second[0], first[1], first[0]]


@pytest.mark.parametrize("bad", [[0], [1], [9]])
def test_giving_or_pinning_what_nobody_owns_is_an_error(bad):
    pool = BlockPool(5)
    with pytest.raises(PoolError):
        pool.give(bad)
    with pytest.raises(PoolError):
        pool.pin(bad)
    pool.audit()


def test_a_block_with_two_owners_is_free_when_both_let_go():
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.pin(blocks)
    pool.give(blocks)
    assert pool.free == 1
    pool.give(blocks)
    assert pool.free == 2
    with pytest.raises(PoolError):
        pool.give(blocks)


def test_never_means_more_than_an_empty_pool_has():
    pool = BlockPool(4)
    assert [pool.fit(n) for n in (3, 4)] == ["ok", "never"]
    pool.take(1)
    assert [pool.fit(n) for n in (2, 3, 4)] == ["ok", "later", "never"]


def test_blocks_and_slot_are_taken_together_or_not_at_all():
    pools = Pools.of(num_blocks=4, num_state_slots=3)
    assert pools.take(4) is None
    assert pools.take(1) is not None
    assert pools.take(1) is not None
    assert pools.take(1) is None, "no slot left"
    assert (pools.blocks.free, pools.states.free) == (1, 0)
    pools.audit()


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "pin"]), st.integers(0, 5))))
def test_free_and_referenced_ids_always_make_the_whole_pool(operations):
    pool, owned = BlockPool(9), list[list[int]]()
    for what, n in operations:
        if what == "take":
            taken = pool.take(n)
            assert (taken is None) == (n > 8 - len({i for ids in owned for i in ids}))
            if taken is not None:
                assert not {i for ids in owned for i in ids} & set(taken)
                owned.append(taken)
        elif owned:
            ids = owned[n % len(owned)]
            if what == "pin":
                pool.pin(ids)
                owned.append(ids)
            else:
                owned.remove(ids)
                pool.give(ids)
        pool.audit()
        assert pool.owned == len({i for ids in owned for i in ids})
