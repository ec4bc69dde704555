from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.plan import choose_cut

FAST = kvtier.Cost(prefill_tok_s=1_000, tiers={"host": (0, 1e12), "disk": (0, 1e12)})


def cut(blocks=10, state_at=None, tiers=None, **changes):
    arguments = {
        "prompt_tokens": blocks * 128 + 50,
        "block_tokens": 128,
        "block_bytes": 114_000,
        "tiers": ["host"] * blocks if tiers is None else tiers,
        "state_at": state_at or {},
        "needs_state": True,
        "generation": 0,
        "approximate": False,
        "mode": "bounded",
        "cost": FAST,
    }
    return choose_cut(**{**arguments, **changes})


def test_stored_state_at_the_end_is_the_best_cut():
    plan = cut(state_at={10: ("host", 1_000, False, 0)})
    assert (plan.n_blocks, plan.state, plan.approximate) == (10, "tier", False)
    assert plan.seconds == pytest.approx(50 / 1_000, abs=1e-4)


def test_a_bounded_replay_costs_128_tokens_and_marks_what_follows():
    plan = cut()
    assert (plan.n_blocks, plan.state, plan.replay_tokens) == (10, "replay", 128)
    assert (plan.approximate, plan.replay_generation) == (True, 1)
    assert plan.seconds == pytest.approx((50 + 128) / 1_000, abs=1e-4)


def test_exact_mode_never_uses_approximate_state():
    assert cut(mode="exact").state == "start"
    assert cut(mode="exact", state_at={10: ("host", 1_000, True, 1)}).state == "start"
    assert cut(mode="exact", approximate=True, state_at={10: ("host", 1, False, 0)}).n_blocks == 0
    plan = cut(mode="exact", state_at={4: ("disk", 1_000, False, 0)})
    assert (plan.n_blocks, plan.state) == (4, "tier")


def test_a_long_prefix_can_be_replayed_exactly():
    plan = cut(blocks=40, mode="exact")
    assert (plan.n_blocks, plan.state, plan.replay_tokens) == (40, "exact_replay", 2_560)
    assert not plan.approximate


def test_without_replay_only_stored_state_counts():
    assert cut(mode="none").state == "start"
    assert cut(mode="none", state_at={3: ("host", 1_000, False, 0)}).n_blocks == 3


def test_replays_in_a_row_are_limited():
    assert cut(generation=7).replay_generation == 8
    assert cut(generation=8).state == "start"


def test_a_slow_tier_is_left_alone():
    slow = kvtier.Cost(prefill_tok_s=1e6, tiers={"host": (0, 1e12), "disk": (1.0, 1e6)})
    tiers = ["host"] * 5 + ["disk"] * 5
    assert cut(tiers=tiers, cost=slow).n_blocks == 5


def test_a_model_without_window_state_uses_blocks_alone():
    plan = cut(needs_state=False)
    assert (plan.n_blocks, plan.state, plan.replay_tokens) == (10, "none", 0)


def test_an_impossible_cost_is_refused():
    with pytest.raises(kvtier.ConfigError, match="prefill_tok_s"):
        cut(cost=kvtier.Cost(prefill_tok_s=0))


@given(
    st.lists(st.sampled_from(["host", "disk"]), max_size=30),
    st.dictionaries(
        st.integers(1, 30),
        st.tuples(
            st.sampled_from(["host", "disk"]),
            st.integers(0, 10**7),
            st.booleans(),
            st.integers(0, 9),
        ),
        max_size=1,
    ),
    st.booleans(),
    st.integers(0, 9),
    st.sampled_from(["bounded", "exact", "none"]),
)
def test_a_plan_is_never_worse_than_computing_everything(tiers, state_at, fuzzy, depth, mode):
    plan = cut(
        prompt_tokens=len(tiers) * 128 + 1,
        tiers=tiers,
        state_at=state_at,
        approximate=fuzzy,
        generation=depth,
        mode=mode,
        cost=kvtier.Cost(),
    )
    assert 0 <= plan.n_blocks <= len(tiers)
    assert plan.n_tokens == plan.n_blocks * 128
    assert plan.seconds <= (len(tiers) * 128 + 1) / 60e3 + 1e-12
    if mode == "exact":
        assert not plan.approximate
    assert plan.replay_generation <= max(9, kvtier.Cost().max_replay_generation)


def test_the_plan_of_a_real_match_uses_its_state(model):
    tokens = model.prompt(1, 6)
    model.store(tokens, states=(6,))
    plan = model.ns.plan(model.ns.match(tokens), mode="exact")
    assert (plan.n_blocks, plan.state) == (6, "tier")
    without = model.prompt(2, 6)
    model.store(without)
    match = model.ns.match(without)
    assert model.ns.plan(match, mode="exact").state == "start"
    assert model.ns.plan(match, mode="bounded").state == "replay"
