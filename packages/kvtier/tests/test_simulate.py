from __future__ import annotations

import json
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.host.eviction import Use
from deepinfer_kvtier.host.policies import ONLINE
from deepinfer_kvtier.host.session_policy import ReturnRates, SessionAware, age_bin
from deepinfer_kvtier.simulation.simulate import simulate
from deepinfer_kvtier.simulation.stretch import DAY_S, StretchLoad, generate
from deepinfer_kvtier.simulation.trace import Request, read_trace


def trace(*prompts: tuple[int, ...], every_s: float = 1.0) -> list[Request]:
    return [Request(i * every_s, len(p) * 512, p) for i, p in enumerate(prompts)]


def test_the_hit_rate_is_tokens_hit_over_tokens_asked():
    result = simulate(trace((1, 2), (1, 2, 3), (1, 9)))
    assert (result.hit_tokens, result.prompt_tokens) == (3 * 512, 7 * 512)
    assert result.peak_blocks == 4


def test_a_partial_last_block_counts_only_its_tokens():
    requests = [Request(0, 700, (1, 2)), Request(1, 700, (1, 2))]
    assert simulate(requests).hit_tokens == 700


def test_a_hole_ends_the_prefix():
    result = simulate(trace((1, 2, 3), (1, 8, 3)))
    assert result.hit_tokens == 512


def test_tail_first_keeps_heads_where_plain_lru_loses_them():
    requests = trace((1, 2, 3), (4,), (1, 2, 3))
    assert simulate(requests, capacity_blocks=3, policy="lru").hit_tokens == 0
    assert simulate(requests, capacity_blocks=3, policy="tail-lru").hit_tokens == 2 * 512


def test_the_oracle_drops_what_is_never_used_again():
    requests = trace((1, 2), (3, 4), (5, 6), (1, 2))
    assert simulate(requests, capacity_blocks=2, policy="oracle").hit_tokens == 2 * 512
    assert simulate(requests, capacity_blocks=2, policy="tail-lru").hit_tokens == 0


def test_a_lifetime_runs_from_the_last_hit_or_from_the_store():
    requests = trace((1,), (1,), (1,), every_s=60)
    assert simulate(requests, ttl_s=59).hit_tokens == 0
    assert simulate(requests, ttl_s=60).hit_tokens == 2 * 512
    assert simulate(requests, ttl_s=60, refresh=False).hit_tokens == 512


PROMPTS = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=5, unique=True).map(tuple), max_size=20
)


@given(PROMPTS, st.integers(0, 8))
def test_nothing_beats_no_limit_and_the_capacity_holds(prompts, capacity):
    requests = trace(*prompts)
    best = simulate(requests).hit_tokens
    for policy in (*ONLINE, "oracle"):
        result = simulate(requests, capacity_blocks=capacity, policy=policy)
        assert result.hit_tokens <= best
        assert result.peak_blocks <= capacity


@given(PROMPTS, st.integers(1, 8))
def test_more_room_never_hurts_plain_lru(prompts, capacity):
    requests = trace(*prompts)
    small = simulate(requests, capacity_blocks=capacity, policy="lru")
    large = simulate(requests, capacity_blocks=capacity + 1, policy="lru")
    assert small.hit_tokens <= large.hit_tokens


def test_a_trace_file_is_read_and_its_bad_line_is_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    good = {"timestamp": 2_500, "input_length": 600, "hash_ids": [1, 2], "output_length": 3}
    path.write_text(json.dumps(good) + "\n\n")
    assert read_trace(path) == [Request(2.5, 600, (1, 2))]
    path.write_text(json.dumps(good) + "\n{}\n")
    with pytest.raises(kvtier.ConfigError, match="line 2"):
        read_trace(path)


def test_unknown_policies_and_capacities_are_refused():
    with pytest.raises(kvtier.ConfigError, match="unknown policy"):
        simulate([], policy="magic")
    with pytest.raises(kvtier.ConfigError, match="capacity"):
        simulate([], capacity_blocks=-1)
    assert simulate([]).hit_rate == 0.0


def conversations(rounds: int, loyal_every: int, gap_s: float = 30.0) -> list[Request]:
    """Single questions in a stream, and some conversations that go on, each turn one block longer.

    Whoever has come back once comes back again; nobody else does.
    """
    requests, fresh, open_chats = [], iter(range(1, 1 << 30)), []
    now = 0.0
    for round_ in range(rounds):
        now += gap_s
        requests.extend(
            Request(now, 8 * 512, (0, *(next(fresh) for _ in range(7)))) for _ in range(4)
        )
        if round_ % loyal_every == 0:
            open_chats.append((0, *(next(fresh) for _ in range(7))))
        for i, chain in enumerate(open_chats):
            open_chats[i] = (*chain, next(fresh))
            requests.append(Request(now, len(chain) * 512, chain))
        open_chats = open_chats[-6:]
    return requests


def test_knowing_sessions_keeps_what_goes_on_and_loses_what_does_not():
    requests = conversations(rounds=300, loyal_every=10)
    hits = {
        policy: simulate(requests, capacity_blocks=110, policy=policy).hit_tokens
        for policy in ("tail-lru", "session", "oracle")
    }
    assert hits["tail-lru"] < 0.7 * hits["oracle"]
    assert hits["session"] > 0.9 * hits["oracle"]


def test_what_is_remembered_of_evicted_blocks_is_bounded():
    policy = SessionAware(remember=2, slack=100)
    cached: set[int] = set()
    for request in conversations(rounds=60, loyal_every=10):
        policy.used(Use(request.blocks, 0, request.tokens, 512, request.at_s))
        new = [block for block in request.blocks if block not in cached]
        policy.entered(new, [None] * len(new), request.at_s)
        cached.update(new)
        while len(cached) > 50:
            victim = policy.victim(lambda name: False)
            policy.left(victim)
            cached.remove(victim)
        assert policy.remembered <= 2 * 50 + 100
    assert simulate(conversations(60, 10), capacity_blocks=50, policy="session").hit_tokens > 0


def test_a_last_block_that_is_not_full_leaves_first():
    half_full = [
        Request(0, 2 * 512 + 9, (1, 2, 3)),
        Request(1, 512, (8,)),
        Request(2, 1024, (1, 2)),
    ]
    assert simulate(half_full, capacity_blocks=3, policy="session").hit_tokens == 2 * 512


def test_rates_of_return_are_learned_by_kind_and_shrink_towards_all():
    rates = ReturnRates(2, doubt=1.0)
    for _ in range(500):
        rates.observe(0, 50.0, returned=True)
        rates.observe(1, 50.0, returned=False)
    learned = rates.rates()
    at = age_bin(50.0)
    assert learned[0, at] > 20 * learned[1, at]
    prices = rates.prices()
    assert prices[0, 0] > prices[1, 0]
    assert prices[0, at] > prices[0, at + 1], "who did not return by then is worth less"


def test_observing_never_loses_time():
    rates = ReturnRates(1)
    for age in (0.0, 3.9, 4.0, 59.0, 1e6):
        rates.observe(0, age, returned=False)
    assert rates.waited_s() == pytest.approx(0 + 3.9 + 4.0 + 59.0 + 1e6)


TRACES = Path(__file__).parents[4] / "shared" / "data" / "traces"
UNLIMITED = {"conversation": 0.3736, "synthetic": 0.6512}
PUBLISHED = {
    ("conversation", "lru"): {1_000: 0.0454, 5_000: 0.1125, 10_000: 0.2153, 30_000: 0.3321},
    ("conversation", "tail-lru"): {1_000: 0.0454, 5_000: 0.1140, 10_000: 0.2157, 30_000: 0.3322},
    ("conversation", "session"): {1_000: 0.0819, 5_000: 0.1772, 10_000: 0.2389, 30_000: 0.3417},
    ("conversation", "oracle"): {1_000: 0.1944, 5_000: 0.3480, 10_000: 0.3736, 30_000: 0.3736},
    ("synthetic", "lru"): {1_000: 0.0840, 5_000: 0.2843, 10_000: 0.4313, 30_000: 0.6356},
    ("synthetic", "tail-lru"): {1_000: 0.0857, 5_000: 0.2845, 10_000: 0.4318, 30_000: 0.6356},
    ("synthetic", "session"): {1_000: 0.0915, 5_000: 0.3037, 10_000: 0.4612, 30_000: 0.6475},
    ("synthetic", "oracle"): {1_000: 0.2819, 5_000: 0.5359, 10_000: 0.6292, 30_000: 0.6512},
}


@pytest.fixture(scope="module")
def traces():
    if not TRACES.is_dir():
        pytest.skip(f"the public traces are not at {TRACES}")
    return {
        name: read_trace(TRACES / f"mooncake_{name}_trace.jsonl")
        for name in ("conversation", "synthetic")
    }


@pytest.mark.slow
def test_the_public_traces_have_their_published_hit_rates(traces):
    for name, rate in UNLIMITED.items():
        assert round(simulate(traces[name]).hit_rate, 4) == rate
    for (name, policy), column in PUBLISHED.items():
        for capacity, rate in column.items():
            result = simulate(traces[name], capacity_blocks=capacity, policy=policy)
            assert result.hit_rate == pytest.approx(rate, abs=0.001), (name, policy, capacity)


@pytest.mark.slow
def test_knowing_sessions_gains_two_points_on_the_conversations_and_loses_none_elsewhere(traces):
    gains = {}
    for name in traces:
        session, lru = (
            simulate(traces[name], capacity_blocks=10_000, policy=policy).hit_rate
            for policy in ("session", "tail-lru")
        )
        gains[name] = session - lru
    assert gains["conversation"] >= 0.02
    assert gains["synthetic"] >= 0.02


def unique() -> list[Request]:
    return trace(*(tuple(range(20 * i, 20 * i + 20)) for i in range(2_000)), every_s=0.3)


def loop() -> list[Request]:
    """A little more than fits, over and over."""
    documents = [tuple(range(20 * i, 20 * i + 20)) for i in range(55)]
    return trace(*documents * 40, every_s=0.3)


def scan() -> list[Request]:
    """A working set that fits, asked in random order, interrupted by what is read once."""
    random, fresh = Random(1), count(1_000)
    documents = [tuple(range(20 * i, 20 * i + 20)) for i in range(30)]
    prompts = []
    for _ in range(60):
        prompts += [random.choice(documents) for _ in range(60)]
        prompts += [tuple(islice(fresh, 20)) for _ in range(60)]
    return trace(*prompts, every_s=0.3)


def hot_prefix() -> list[Request]:
    fresh = count(4)
    return trace(*((0, 1, 2, 3, *islice(fresh, 40)) for _ in range(1_500)), every_s=0.3)


def stretched() -> list[Request]:
    return generate(StretchLoad(days=2))


@pytest.mark.parametrize(
    ("load", "gain"),
    [(unique, 0), (loop, 0.8), (scan, 0.15), (hot_prefix, 0), (stretched, -0.005)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_knowing_sessions_loses_next_to_nothing_where_there_are_none(load, gain):
    requests = load()
    session, lru = (
        simulate(requests, capacity_blocks=1_000, policy=policy).hit_rate
        for policy in ("session", "tail-lru")
    )
    assert session - lru >= gain - 1e-9


@pytest.mark.slow
def test_started_cold_it_loses_next_to_nothing_on_half_a_trace(traces):
    for name, requests in traces.items():
        for part in (requests[: len(requests) // 2], requests[len(requests) // 2 :]):
            for capacity in (1_000, 10_000):
                session, lru = (
                    simulate(part, capacity_blocks=capacity, policy=policy).hit_rate
                    for policy in ("session", "tail-lru")
                )
                assert session - lru >= (-0.005 if capacity == 1_000 else 0.01), (name, capacity)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_seven_days_of_chat_beat_three_by_less_than_a_point_in_the_synthetic_load(seed):
    requests = generate(StretchLoad(days=16, seed=seed))
    agent = kvtier.RetentionClass(1, 3 * DAY_S)
    rates = [
        simulate(
            requests,
            classes={"chat": kvtier.RetentionClass(2, days * DAY_S), "agent": agent},
            measure_from_s=8 * DAY_S,
        ).hit_rate_by_class
        for days in (3, 7)
    ]
    assert 0.005 <= rates[1]["chat"] - rates[0]["chat"] <= 0.01
    assert rates[1]["agent"] == rates[0]["agent"]


def test_a_load_follows_from_its_seed_alone():
    small = StretchLoad(days=1, sessions_per_day=40)
    assert generate(small) == generate(small)
    assert generate(small) != generate(replace(small, seed=2))
    with pytest.raises(kvtier.ConfigError, match="days"):
        StretchLoad(days=0)


def test_lifetimes_go_by_the_class_of_the_request():
    requests = [
        Request(at, 512, (block,), cls) for at in (0, 90) for block, cls in ((1, "a"), (2, "b"))
    ]
    classes = {"a": kvtier.RetentionClass(1, 60), "b": kvtier.RetentionClass(2, 120)}
    assert simulate(requests, classes=classes).hit_rate_by_class == {"a": 0.0, "b": 0.5}
    with pytest.raises(kvtier.ConfigError, match="unknown class 'b'"):
        simulate(requests, classes={"a": classes["a"]})
