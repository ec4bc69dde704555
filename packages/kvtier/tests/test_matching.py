"""What a lookup finds: whole blocks of an equal beginning, and where the state is."""

from __future__ import annotations

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock, payload_of

BLOCK_BYTES = 5_000


STATE_BYTES = 9_001


def test_an_empty_cache_matches_nothing_and_still_names_the_blocks(model):
    match = model.ns.match(model.prompt(1, 4))
    assert (match.n_blocks, match.n_tokens, match.state, match.spans) == (0, 0, None, ())
    assert len(match.digests) == 4


def test_second_turn_reuses_every_full_block_of_the_first(model):
    first = model.prompt(1, 6, tail=17)
    model.store(first, durability="flushed").wait(60)
    second = np.concatenate((first, model.prompt(2, 3)))
    assert model.block_hits(second) == 6
    assert model.load_all(second) == (6, 6)


def test_a_hit_never_covers_the_whole_prompt(model):
    tokens = model.prompt(1, 3, tail=0)
    model.store(tokens)
    assert model.block_hits(tokens) == 2
    assert model.block_hits(tokens, leave_last=False) == 3


def test_no_hit_in_the_middle_of_a_chain(model):
    tokens = model.prompt(1, 5)
    model.store(tokens, first=2)
    assert model.block_hits(tokens) == 0
    model.store(tokens[: 2 * 128])
    assert model.block_hits(tokens) == 5


def test_one_changed_token_ends_the_hit_at_its_block(model):
    tokens = model.prompt(1, 6)
    model.store(tokens)
    changed = tokens.copy()
    changed[3 * 128 + 7] ^= 1
    assert model.block_hits(changed) == 3


def test_an_exact_hit_ends_where_blocks_and_state_are_both_there(model):
    tokens = model.prompt(1, 6)
    model.store(tokens, states=(2, 4))
    match = model.ns.match(tokens)
    assert (match.n_blocks, match.n_tokens, match.block_prefix) == (4, 512, 6)
    assert match.state is not None
    assert match.state.n_blocks == 4
    state = np.zeros(STATE_BYTES, np.uint8)
    dst = np.zeros((4, BLOCK_BYTES), np.uint8)
    result = model.ns.load(match, dst=dst, state_dst=state).wait()
    assert result.ok
    assert result.state is kvtier.Status.OK
    assert np.array_equal(state, payload_of(match.digests[3] + b"s", STATE_BYTES))
    assert model.check(match, result, dst) == 4


def test_state_without_its_blocks_is_no_hit(model):
    tokens = model.prompt(1, 4)
    digests = model.digests(tokens)
    model.ns.put_state(digests[3], payload_of(digests[3], STATE_BYTES), n_blocks=4)
    assert model.ns.match(tokens).n_blocks == 0


def test_blocks_without_any_state_are_no_exact_hit(model):
    tokens = model.prompt(1, 4)
    model.store(tokens)
    match = model.ns.match(tokens)
    assert (match.n_blocks, match.block_prefix, match.state) == (0, 4, None)


def test_a_layout_without_state_needs_none(cache):
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", BLOCK_BYTES))})
    ns = cache.namespace(layout, model="dense")
    tokens = list(range(300))
    match = ns.match(tokens)
    ns.put(match.digests, [payload_of(d, BLOCK_BYTES) for d in match.digests])
    assert ns.match(tokens).n_blocks == 2
    with pytest.raises(kvtier.ConfigError, match="no kind"):
        ns.put_state(match.digests[0], b"")


def test_records_of_zero_bytes_are_legal(cache):
    layout = kvtier.LayoutSpec(16, {"block": kvtier.parts(("nothing", 0))})
    ns = cache.namespace(layout, model="empty")
    digests = ns.match(list(range(33))).digests
    assert ns.put(digests, b"", durability="flushed").wait(60)
    match = ns.match(list(range(33)))
    assert match.n_blocks == 2
    assert ns.load(match, dst=bytearray()).wait().ok


@pytest.mark.parametrize("change", ["salt", "model", "adapters", "numerics", "shard", "layout"])
def test_whatever_changes_bytes_or_rights_changes_the_identity(cache, model, change):
    tokens = model.prompt(1, 3)
    model.store(tokens, states=(3,))
    same = {"model": "model", "salt": "tenant"}
    layout = model.layout
    assert cache.namespace(layout, **same).match(tokens).n_blocks == 3
    if change == "shard":
        same["shard"] = kvtier.Shard(1, 2, "heads")
    elif change == "adapters":
        same["adapters"] = [{"digest": "ab", "scale": 1.0}]
    elif change == "layout":
        layout = kvtier.LayoutSpec(
            128, {**layout.kinds, "block": kvtier.parts(("main", 4_000), ("index", 1_000))}
        )
    else:
        same[change] = "other"
    assert cache.namespace(layout, **same).match(tokens).n_blocks == 0


def test_leased_records_survive_eviction_pressure(store, make_model, check_leaks):
    with kvtier.open(store, host_bytes=8 * BLOCK_BYTES, persist_state=False) as cache:
        model = make_model(cache)
        leased = model.prompt(1, 4)
        model.store(leased, durability="flushed").wait(60)
        match = model.ns.match(leased, want=("block",))
        for seed in range(2, 12):
            model.store(model.prompt(seed, 4), durability="flushed").wait(60)
        dst = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert all(cache.host.contains(0, d) for d in match.digests)
        assert model.check(match, model.ns.load(match, dst=dst).wait(), dst) == 4
        match.release()
        check_leaks(cache)


def test_a_lease_ends_by_itself_and_can_be_renewed_before(store, make_model):
    clock = ManualClock()
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, durability="flushed").wait(60)
        match = model.ns.match(tokens, want=("block",), lease_s=60)
        clock.advance(59)
        assert match.renew()
        clock.advance(59)
        assert match.renew(10)
        clock.advance(11)
        assert not match.renew()
        assert cache.host.pins() == 0
        # Without a lease a load still works, or says that it did not.
        dst = np.zeros((3, BLOCK_BYTES), np.uint8)
        assert model.check(match, model.ns.load(match, dst=dst).wait(), dst) == 3


def test_a_leased_match_is_readable_after_its_records_were_dropped(model, check_leaks):
    tokens = model.prompt(1, 3)
    model.store(tokens, states=(3,), durability="flushed").wait(60)
    match = model.ns.match(tokens)
    model.ns.drop(model.digests(tokens))
    for seed in range(2, 6):
        model.store(model.prompt(seed, 4))
    dst, state = np.zeros((3, BLOCK_BYTES), np.uint8), np.zeros(STATE_BYTES, np.uint8)
    result = model.ns.load(match, dst=dst, state_dst=state).wait()
    assert result.ok
    assert model.check(match, result, dst) == 3
    match.release()
    assert model.block_hits(tokens) == 0
    assert model.check(match, model.ns.load(match, dst=dst).wait(), dst) == 0
    check_leaks(model.cache)


def test_releasing_twice_is_harmless(model, check_leaks):
    tokens = model.prompt(1, 2)
    model.store(tokens)
    match = model.ns.match(tokens, want=("block",))
    match.release()
    match.release()
    check_leaks(model.cache)


def test_matching_has_no_side_effect_but_its_lease(model, check_leaks):
    tokens = model.prompt(1, 3)
    model.store(tokens)
    for _ in range(5):
        assert model.block_hits(tokens) == 3
    check_leaks(model.cache)
