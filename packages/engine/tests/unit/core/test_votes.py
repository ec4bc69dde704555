"""What a data-parallel group runs next: the rule alone, and ranks that vote by it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ranks_of, step_all
from toy_engine import BLOCK, alone, greedy, prompt, request, toy

from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.core.votes import LEAST_DECODES, Tally, Vote


def upstream(**options):
    return Vote(4, "upstream", **options)


def after(vote, decodes):
    for _ in range(decodes):
        vote.ran("decode")
    return vote


@pytest.mark.parametrize(
    ("decodes", "want", "kind"),
    [
        (0, 4, "prefill"),  # an ALL point
        (0, 3, "decode"),
        (1, 4, "decode"),  # no point at all
        (70, 4, "prefill"),
        (70, 3, "decode"),
        (99, 1, "decode"),
        (100, 1, "prefill"),  # an ANY point
        (100, 0, "decode"),
        (140, 4, "prefill"),
        (700, 1, "prefill"),  # both: ANY wins
    ],
)
def test_upstream_reads_at_all_points_if_all_want_and_at_any_points_if_one_does(
    decodes, want, kind
):
    assert after(upstream(), decodes).decide(Tally(want, 4, want)) == kind


def test_points_are_counted_from_the_last_step_that_read():
    vote = after(upstream(), 100)
    vote.ran("prefill")
    assert after(vote, 1).decide(Tally(4, 4, 4)) == "decode"


@pytest.mark.parametrize(
    ("decodes", "tally", "kind"),
    [
        (0, Tally(1, 0, 0), "prefill"),  # nobody is held up
        (0, Tally(0, 4, 0), "decode"),
        (1, Tally(1, 4, 0), "decode"),
        (1, Tally(1, 4, 1), "prefill"),  # it has waited long
        (0, Tally(4, 4, 4), "decode"),  # those that run had no step since
        (LEAST_DECODES, Tally(3, 4, 0), "prefill"),
        (LEAST_DECODES, Tally(2, 4, 0), "decode"),
        (LEAST_DECODES - 1, Tally(4, 4, 0), "decode"),
    ],
)
def test_urgent_reads_when_nobody_is_held_up_when_one_waited_long_or_when_most_want(
    decodes, tally, kind
):
    assert after(Vote(4), decodes).decide(tally) == kind


@pytest.mark.parametrize("policy", ["urgent", "upstream"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_all_ranks_run_the_same_steps_and_each_request_says_what_it_says_alone(policy, seed):
    random = Random(seed)
    ranks = ranks_of(
        3,
        policy=policy,
        make=lambda: toy(num_blocks=20, num_state_slots=8, nextn=2),
        max_num_seqs=random.choice([2, 4]),
        max_num_batched_tokens=random.choice([1, 4]) * BLOCK,
        decode_reserve_tokens=0,
        prefill_attempt_interval=5,
        prefill_any_attempt_interval=7,
    )
    asked = {}
    now = 0.0
    for n in range(12):
        rank, name = random.randrange(3), f"r{n}"
        tokens = prompt(seed % 1000 + n, random.randint(1, 3 * BLOCK))
        sampling = SamplingParams(
            temperature=random.choice([0.0, 1.0]), seed=n, max_tokens=random.randint(1, 9)
        )
        asked[name] = rank, tokens, sampling
        ranks[rank].loop.submit(request(name, tokens, sampling), name, now)
        if random.random() < 0.2:
            ranks[rank].loop.abort(name)
            del asked[name]
        for _ in range(random.randrange(5)):
            now += 0.1
            step_all(ranks, now)
    while any(rank.loop.unfinished for rank in ranks):
        now += 0.1
        step_all(ranks, now)
        assert now < 1000
    first, *others = ranks
    assert all(rank.seen == first.seen for rank in others), "kind, tally and number of votes"
    for name, (rank, tokens, sampling) in asked.items():
        assert ranks[rank].sink.tokens[name] == alone(tokens, sampling, nextn=2)
    for rank in ranks:
        rank.loop.audit()


def test_a_lonely_request_of_an_idle_group_is_read_in_the_next_step():
    ranks = ranks_of(4)
    ranks[2].loop.submit(request("a", prompt(1, 10)), "a", 0.0)
    step_all(ranks, 0.0)
    assert {rank.loop.kind for rank in ranks} == {"prefill"}
    assert len(ranks[2].sink.tokens["a"]) == 1
    assert [rank.empty for rank in ranks] == [1, 1, 0, 1], "others took part with nothing"


def test_upstream_makes_a_lonely_request_wait_for_the_next_any_point_and_no_longer():
    ranks = ranks_of(
        2, policy="upstream", prefill_attempt_interval=5, prefill_any_attempt_interval=8
    )
    for i, rank in enumerate(ranks):
        rank.loop.submit(request("runs", prompt(i, 10), greedy(200, ignore_eos=True)), "runs", 0.0)
    step_all(ranks, 0.0)
    step_all(ranks, 0.0)
    ranks[0].loop.submit(request("lonely", prompt(7, 10)), "lonely", 0.0)
    steps = 0
    while "lonely" not in ranks[0].sink.tokens:
        step_all(ranks, 0.0)
        steps += 1
    assert steps == 8


@pytest.mark.parametrize("policy", ["urgent", "upstream"])
def test_who_wants_and_has_no_memory_keeps_nobody_from_decoding(policy):
    """The second vote: without it each step would read nothing."""
    ranks = ranks_of(
        2,
        policy=policy,
        make=lambda: toy(num_blocks=9, num_state_slots=4, nextn=0),
        max_num_seqs=1,
        decode_reserve_tokens=0,
        prefill_attempt_interval=1,
    )
    for rank in ranks:
        rank.loop.submit(request("runs", prompt(1, 10), greedy(30, ignore_eos=True)), "runs", 0.0)
    step_all(ranks, 0.0)
    for rank in ranks:
        rank.loop.submit(request("waits", prompt(2, 10)), "waits", 0.0)
    for n in range(10):
        step_all(ranks, 100.0 + n)
        assert ranks[0].loop.tally.want == 2
    assert [kind for kind, *_ in ranks[0].seen[1:]] == ["decode"] * 10
    assert len(ranks[0].sink.tokens["runs"]) == 11
    assert ranks[0].loop._vote.decode_steps == 10, "nothing was read, nothing is reset"


def test_a_queue_of_dead_requests_neither_starts_nor_stops_a_step():
    ranks = ranks_of(2, policy="upstream", prefill_attempt_interval=1)
    ranks[0].loop.submit(request("dead", prompt(1, 10)), "dead", 0.0)
    ranks[0].loop.abort("dead")
    step_all(ranks, 0.0)
    assert ranks[0].loop.tally.idle
    assert ranks[1].empty == 0, "nobody ran an empty pass"
    for rank in ranks:
        rank.loop.submit(request("a", prompt(2, 10)), "a", 0.0)
    ranks[1].loop.submit(request("dead", prompt(1, 10)), "dead", 0.0)
    ranks[1].loop.abort("dead")
    step_all(ranks, 0.0)
    assert ranks[0].loop.kind == "prefill"


def test_a_long_prompt_leaves_every_second_step_to_those_that_run():
    ranks = ranks_of(2, max_num_batched_tokens=2 * BLOCK)
    ranks[0].loop.submit(request("runs", prompt(1, 4), greedy(90, ignore_eos=True)), "runs", 0.0)
    step_all(ranks, 0.0)
    ranks[1].loop.submit(request("long", prompt(2, 20 * BLOCK)), "long", 0.0)
    for n in range(12):
        step_all(ranks, 10.0 + n)
    kinds = [kind for kind, *_ in ranks[0].seen[1:]]
    assert kinds == ["decode", "prefill"] * 6
