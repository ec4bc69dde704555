from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.simulate import POLICIES, Request, read_trace, simulate


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
    for policy in POLICIES:
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
