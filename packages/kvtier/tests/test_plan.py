from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.flow.plan import (
    HALF_LIFE_S,
    UNKNOWN_TIER,
    WEIGHT,
    BlockQuality,
    CostModel,
    StoredState,
    choose_cut,
)

FAST = kvtier.Cost(prefill_tok_s=1_000, tiers={"host": (0, 1e12), "disk": (0, 1e12)})


def cut(blocks=10, state_at=None, tiers=None, mark=None, **changes):
    tiers = ["host"] * blocks if tiers is None else tiers
    arguments = {
        "prompt_tokens": len(tiers) * 128 + 50,
        "block_tokens": 128,
        "block_bytes": 114_000,
        "tiers": tiers,
        "state_at": {k: StoredState(*v) for k, v in (state_at or {}).items()},
        "needs_state": True,
        "marks": [mark or BlockQuality()] * len(tiers),
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
    fuzzy = BlockQuality(approximate=True)
    assert cut(mode="exact").state == "start"
    assert cut(mode="exact", state_at={10: ("host", 1_000, True, 1)}).state == "start"
    assert cut(mode="exact", mark=fuzzy, state_at={10: ("host", 1, False, 0)}).n_blocks == 0
    plan = cut(mode="exact", state_at={4: ("disk", 1_000, False, 0)})
    assert (plan.n_blocks, plan.state) == (4, "tier")


def test_exact_mode_uses_the_exact_head_of_a_chain_with_an_approximate_tail():
    marks = [BlockQuality()] * 30 + [BlockQuality(True, 1)] * 10
    plan = cut(blocks=40, mode="exact", marks=marks)
    assert (plan.n_blocks, plan.state, plan.approximate) == (30, "exact_replay", False)


def test_a_long_prefix_can_be_replayed_exactly():
    plan = cut(blocks=40, mode="exact")
    assert (plan.n_blocks, plan.state, plan.replay_tokens) == (40, "exact_replay", 2_560)
    assert not plan.approximate


def test_without_replay_only_stored_state_counts():
    assert cut(mode="none").state == "start"
    assert cut(mode="none", state_at={3: ("host", 1_000, False, 0)}).n_blocks == 3


def test_beyond_the_replay_limit_an_exact_replay_is_forced():
    assert cut(mark=BlockQuality(True, 7)).replay_generation == 8
    assert cut(mark=BlockQuality(True, 8)).state == "start"
    plan = cut(blocks=40, mark=BlockQuality(True, 8))
    assert (plan.n_blocks, plan.state, plan.replay_generation) == (40, "exact_replay", 8)


def test_a_slow_tier_is_left_alone():
    slow = kvtier.Cost(prefill_tok_s=1e6, tiers={"host": (0, 1e12), "disk": (1.0, 1e6)})
    tiers = ["host"] * 5 + ["disk"] * 5
    assert cut(tiers=tiers, cost=slow).n_blocks == 5


def test_a_window_at_a_peer_is_pulled_only_when_that_beats_the_replay():
    state_at = {10: ("peer", 1_415_040, False, 0)}
    near = kvtier.Cost(tiers={"host": (0, 1e12), "peer": (0.5e-3, 2e9)})
    far = kvtier.Cost(tiers={"host": (0, 1e12), "peer": (50e-3, 1e8)})
    assert cut(state_at=state_at, cost=near).state == "tier"
    assert cut(state_at=state_at, cost=far).state == "replay"


def test_a_load_that_other_work_hides_costs_nothing():
    tiers = ["disk"] * 10
    slow = {"disk": (0.0, 114_000 / 0.01)}  # 10 ms a block, against 2 ms to compute it
    cost = kvtier.Cost(prefill_tok_s=64_000, tiers=slow, overlap_s=0.055)
    plan = cut(tiers=tiers, cost=cost, needs_state=False)
    assert plan.n_blocks == 5


def test_a_model_without_window_state_uses_blocks_alone():
    plan = cut(needs_state=False)
    assert (plan.n_blocks, plan.state, plan.replay_tokens) == (10, "none", 0)


def test_an_impossible_cost_is_refused():
    with pytest.raises(kvtier.ConfigError, match="prefill_tok_s"):
        kvtier.Cost(prefill_tok_s=0)
    with pytest.raises(kvtier.ConfigError, match="'peer' needs"):
        kvtier.Cost(tiers={"peer": (0, 0)})


TIERS = ("host", "disk", "far", "unknown")
STATES = st.dictionaries(
    st.integers(1, 40),
    st.tuples(
        st.sampled_from([*TIERS, "peer"]),
        st.integers(0, 10**7),
        st.booleans(),
        st.integers(0, 9),
    ),
    max_size=3,
)
RUNS = st.lists(st.tuples(st.sampled_from(TIERS), st.integers(1, 12)), max_size=5).map(
    lambda runs: [tier for tier, count in runs for _ in range(count)]
)
COSTS = st.builds(
    kvtier.Cost,
    prefill_tok_s=st.sampled_from([2e3, 60e3, 1.5e6]),
    exact_replay_tokens=st.sampled_from([2560, 700]),
    tiers=st.fixed_dictionaries(
        {
            tier: st.tuples(st.sampled_from([0.0, 1e-3, 0.1]), st.sampled_from([1e7, 1e9, 1e11]))
            for tier in ("host", "disk", "far", "peer")
        }
    ),
    max_replay_generation=st.sampled_from([0, 3, 8]),
    overlap_s=st.sampled_from([0.0, 2e-3, 0.05]),
)


def every_cut(tiers, state_at, marks, mode, cost, needs_state, block_bytes, prompt):
    """The rules once more, written down for each cut by itself: (seconds, blocks) of all ways."""
    ways = [(cost.overlap_s + prompt / cost.prefill_tok_s, 0)]
    for k in range(1, len(tiers) + 1):
        fuzzy = any(mark.approximate for mark in marks[:k])
        depth = max(mark.generation for mark in marks[:k])
        if mode == "exact" and fuzzy:
            continue
        load = 0.0
        for tier in set(tiers[:k]):
            latency, rate = cost.tiers.get(tier, UNKNOWN_TIER)
            load += latency + tiers[:k].count(tier) * block_bytes / rate
        rest = max(load, cost.overlap_s) + (prompt - 128 * k) / cost.prefill_tok_s
        if not needs_state:
            ways.append((rest, k))
            continue
        if mode != "none" and 128 * k >= cost.exact_replay_tokens:
            ways.append((rest + cost.exact_replay_tokens / cost.prefill_tok_s, k))
        if mode == "bounded" and depth < cost.max_replay_generation:
            ways.append((rest + 128 / cost.prefill_tok_s, k))
        if k in state_at and not (mode == "exact" and state_at[k].approximate):
            latency, rate = cost.tiers.get(state_at[k].tier, UNKNOWN_TIER)
            nbytes = state_at[k].nbytes
            ways.append((rest + (latency + nbytes / rate if nbytes else 0.0), k))
    return ways


@given(
    RUNS,
    STATES,
    st.lists(st.builds(BlockQuality, st.booleans(), st.integers(0, 4)), max_size=3),
    st.sampled_from(["bounded", "exact", "none"]),
    COSTS,
    st.booleans(),
    st.integers(1, 300),
)
def test_no_cut_at_all_beats_the_plan(tiers, states, tail_marks, mode, cost, needs_state, tail):
    clean = max(0, len(tiers) - len(tail_marks))
    marks = ([BlockQuality()] * clean + tail_marks)[: len(tiers)]
    state_at = {k: StoredState(*v) for k, v in states.items() if k <= len(tiers)}
    prompt = len(tiers) * 128 + tail
    plan = choose_cut(
        prompt_tokens=prompt,
        block_tokens=128,
        block_bytes=114_000,
        tiers=tiers,
        state_at=state_at,
        needs_state=needs_state,
        marks=marks,
        mode=mode,
        cost=cost,
    )
    ways = every_cut(tiers, state_at, marks, mode, cost, needs_state, 114_000, prompt)
    assert plan.seconds == pytest.approx(min(seconds for seconds, _ in ways), rel=1e-9)
    assert any(k == plan.n_blocks and s == pytest.approx(plan.seconds) for s, k in ways)
    assert plan.n_tokens == plan.n_blocks * 128
    if mode == "exact":
        assert not plan.approximate


def test_of_equal_cuts_the_deeper_one_is_taken():
    free = kvtier.Cost(prefill_tok_s=128.0, tiers={"host": (0.0, 114_000.0)})
    assert cut(blocks=4, cost=free, needs_state=False).n_blocks == 4


def test_observed_loads_move_the_cost_model():
    model = CostModel(kvtier.Cost(tiers={"disk": (1e-3, 1e9)}), clock=lambda: 0.0)
    for _ in range(60):
        model.observe_load("disk", 100 << 20, (100 << 20) / 2e8 + 1e-3)
    latency, rate = model.current().tiers["disk"]
    assert rate == pytest.approx(2e8, rel=0.05)
    assert latency == pytest.approx(1e-3)
    for _ in range(60):
        model.observe_load("disk", 4096, 9e-3)
    assert model.current().tiers["disk"][0] == pytest.approx(9e-3, rel=0.05)
    assert model.current().tiers["disk"][1] == pytest.approx(rate)


def test_one_observation_moves_it_by_its_weight():
    model = CostModel(kvtier.Cost(tiers={"disk": (0.0, 1e9)}), clock=lambda: 0.0)
    model.observe_load("disk", 1 << 30, (1 << 30) / 5e8)
    assert 1 / model.current().tiers["disk"][1] == pytest.approx(1e-9 + WEIGHT * 1e-9)


def test_a_tier_that_was_slow_once_is_tried_again():
    now = [0.0]
    model = CostModel(kvtier.Cost(tiers={"disk": (1e-3, 1e9)}), clock=lambda: now[0])
    model.observe_load("disk", 1 << 20, 60.0)  # a stall
    model.observe_load("disk", 4096, 60.0)

    def planned() -> int:
        cost = replace(model.current(), prefill_tok_s=2000.0)
        return cut(tiers=["disk"] * 4, cost=cost, needs_state=False).n_blocks

    assert planned() == 0, "as long as that is believed, computing is faster"
    now[0] = HALF_LIFE_S
    latency, rate = model.current().tiers["disk"]
    assert latency == pytest.approx(1e-3 + (WEIGHT * 60.0) / 2, rel=1e-3)
    assert 1 / rate == pytest.approx(WEIGHT * 60.0 / (1 << 20) / 2, rel=1e-3)
    now[0] = 20 * HALF_LIFE_S
    assert planned() == 4, "nothing was loaded meanwhile that could have told"


@given(st.lists(st.tuples(st.sampled_from(TIERS), st.integers(0, 1 << 28), st.floats(0, 10))))
def test_no_observation_makes_an_impossible_cost(observations):
    model = CostModel()
    for tier, nbytes, seconds in observations:
        model.observe_load(tier, nbytes, seconds)
    assert all(latency >= 0 and rate > 0 for latency, rate in model.current().tiers.values())


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


def test_the_plan_of_a_real_match_knows_where_its_approximate_tail_begins(model):
    tokens = model.prompt(3, 30)
    digests = model.digests(tokens)
    model.store(tokens)
    more = [*tokens[: 30 * 128], *model.prompt(4, 4)]
    model.store(more, first=30, approximate=True, replay_generation=2)
    assert model.digests(more)[:30] == digests
    match = model.ns.match(more)
    assert match.block_prefix == 34
    plan = model.ns.plan(match, mode="exact")
    assert (plan.n_blocks, plan.state) == (30, "exact_replay")
    assert model.ns.plan(match, mode="bounded").replay_generation == 3


def test_plans_and_approximate_records_are_counted(model):
    tokens = model.prompt(5, 4)
    model.store(tokens, approximate=True, replay_generation=1)
    with model.ns.match(tokens) as match:
        model.ns.plan(match)
        model.ns.plan(match, mode="none")
    replay = model.cache.stats()["replay"]
    assert (replay["plans_replay"], replay["plans_start"]) == (1, 1)
    assert replay["approximate_blocks"] == 4
    assert replay["approximate_share"] == 1.0
    assert "kvtier_approximate_share 1.0" in model.cache.metrics()
    assert 'kvtier_plans_total{state="replay"} 1' in model.cache.metrics()


def test_loads_from_one_tier_teach_the_cache_its_cost(model):
    tokens = model.prompt(6, 40)
    model.store(tokens)
    before = model.cache.costs.current().tiers["host"]
    for _, _ in itertools.product(range(2), range(2)):
        model.load_all(tokens)
    assert model.cache.costs.observations == 4
    assert model.cache.costs.current().tiers["host"] != before


def test_generations_saturate_where_records_have_no_more_room_for_them(model):
    tokens = model.prompt(1, 3)
    model.store(tokens, approximate=True, replay_generation=500)
    with model.ns.match(tokens) as match:
        assert match.block_generation == 127
        plan = model.ns.plan(match, cost=kvtier.Cost(max_replay_generation=1000))
        assert (plan.state, plan.replay_generation) == ("replay", 127)
        assert model.ns.plan(match, cost=kvtier.Cost(max_replay_generation=127)).state != "replay"
