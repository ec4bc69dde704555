"""The proof that how a loop runs requests changes nothing that they say.

One request at a time, batched, overlapped, with drafts and without: the tokens, their
log-probabilities and the reasons are the same, through aborts, preemptions, stops, grammars and
several answers to a prompt. The toy's draws depend on history and seed alone, as in the coupled
mode of real models.
"""

from __future__ import annotations

from collections import Counter

import pytest
from random_requests import WAYS, check_equal, compare, model_requests, run_all


def proved(seeds: range, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        for counters in compare(seed, count).values():
            seen.update(counters)
    return seen


def happened(seen: Counter[str]) -> None:
    """Nothing was proved of what did not happen."""
    for what in (
        "preemptions", "urgent_preemptions", "parked", "recomputed", "forked_prompts",
        "mixed_steps", "aborts", "accepted_tokens", "constrained_requests",
    ):  # fmt: skip
        assert seen[what], what


def test_four_hundred_random_requests_say_the_same_however_they_are_run():
    happened(proved(range(8), 50))


@pytest.mark.slow
def test_ten_thousand_random_requests_say_the_same_however_they_are_run():
    happened(proved(range(1000, 1100), 100))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_requests_to_the_embedded_model_say_the_same_in_float64(seed):
    """Greedy and coupled, in memory that is too small for all of them."""
    from deepinfer_engine.demo import demo_path
    from deepinfer_engine.model.runner import build_runner

    def runner(nextn: int, blocks: int):
        return build_runner(
            demo_path(), dtype="float64", nextn=nextn, num_blocks=blocks, num_state_slots=12
        )

    requests = model_requests(seed, 50, 300)
    oracle = run_all(requests, nextn=0, runner=runner(0, 64), alone=True, max_num_seqs=1)
    seen: Counter[str] = Counter()
    for way, options in WAYS.items():
        nextn = options["nextn"]
        config = {key: value for key, value in options.items() if key != "nextn"}
        said = run_all(
            requests,
            nextn=nextn,
            runner=runner(nextn, 12),
            max_num_seqs=6,
            max_num_batched_tokens=256,
            decode_reserve_tokens=0,
            park_bytes=(1 << 20) * (seed % 2),
            max_queue=50,
            **config,
        )
        seen.update(run_all.counters)  # type: ignore[attr-defined]
        check_equal(requests, said, oracle, way)
    assert seen["forked_prompts"]
    assert seen["preemptions"]
    assert seen["accepted_tokens"]
