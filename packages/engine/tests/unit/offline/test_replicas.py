"""`LLM(dp=2)`: prompts in two processes that share the experts; the answers are those of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from dense_checkpoint import write_dense
from tiny_checkpoint import write_tiny
from toy_engine import greedy, hand_loop, prompt, request, run_dry

from deepinfer_engine import LLM, ConfigError, EngineLost, SamplingParams
from deepinfer_engine.offline.replica import REPORT_S, Reporter

PROMPTS = [[5 + i, 9, 30 + 7 * i, 4] * (1 + 5 * (i % 3)) for i in range(9)]
PARAMS = [
    SamplingParams(temperature=(0, 0.9)[i % 2], seed=i, max_tokens=6 + 3 * i, ignore_eos=True, n=n)
    for i, n in enumerate([1, 1, 2, 1, 1, 1, 3, 1, 1])
]


def llm(folder: Path, **options) -> LLM:
    return LLM(
        folder, dtype="float64", cache_quant="none", max_num_seqs=3, num_blocks=40, **options
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("replicas"))


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[LLM]:
    with llm(folder, dp=2) as made:
        yield made


def tokens(completions):
    return [
        (one.token_ids, one.finish_reason, one.usage.prompt_tokens, one.usage.completion_tokens)
        for c in completions
        for one in (c, *c.others)
    ]


def test_two_processes_say_what_one_says(folder: Path, two: LLM) -> None:
    with llm(folder) as one:
        wanted = tokens(one.generate(PROMPTS, PARAMS))
    assert tokens(two.generate(PROMPTS, PARAMS)) == wanted
    assert tokens(two.generate(PROMPTS, PARAMS)) == wanted, "from their caches"
    assert two._loop.unfinished == 0


def test_both_processes_have_requests_and_log_probabilities_come_back(two: LLM) -> None:
    ranks = []
    submit = two._loop.submit

    def seen(request, *rest):
        submit(request, *rest)
        ranks.append(request.request_id in two._loop._elsewhere)

    two._loop.submit = seen  # type: ignore[method-assign]
    done = two.generate(
        [[5, 6], [7, 8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    )
    del two._loop.submit
    assert ranks == [False, True]
    assert [len(c.logprobs) for c in done] == [3, 3]
    assert [[one.token for one in c.logprobs] for c in done] == [list(c.token_ids) for c in done]


def test_who_leaves_a_stream_ends_it_in_the_other_process_too(two: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    stream = two.stream([[5, 6], [7, 8]], long)
    next(stream)
    stream.close()
    assert two._loop.unfinished == 0
    done = two.generate([[5, 6], [7, 8], [9, 3]], with_max(4))
    assert [len(c.token_ids) for c in done] == [4, 4, 4]


def with_max(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def test_what_has_no_experts_to_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experts that processes could share"):
        LLM(write_dense(tmp_path / "dense"), dp=2)
    with pytest.raises(ConfigError, match="vote_policy must be"):
        LLM(tmp_path, vote_policy="all")  # type: ignore[arg-type]


def test_a_killed_process_is_an_error_that_says_so(folder: Path, two: LLM) -> None:
    """The last of this file: the group is gone."""
    with pytest.raises(ConfigError, match="one group"):
        llm(folder, dp=2)
    (member,) = two._group.members
    os.kill(member.process.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"step failed: .*(rank|process|experts)"):
        two.generate(PROMPTS, PARAMS)
    with pytest.raises(EngineLost, match="has stopped"):
        two.generate([[5]], with_max(2))


def test_a_rank_reports_now_and_then_and_at_once_when_it_is_done() -> None:
    loop, _ = hand_loop()
    reporter = Reporter(loop, None)
    assert reporter.due(0.0) is not None
    loop.submit(request("a", prompt(1, 9), greedy(20, ignore_eos=True)), "a", 0.0)
    loop.step(0.0)
    assert reporter.due(0.5 * REPORT_S) is None
    counters, gauges = reporter.due(1.5 * REPORT_S) or ({}, {})
    assert (counters["prompt_tokens"], gauges["running"]) == (9, 1)
    assert reporter.due(1.6 * REPORT_S) is None
    run_dry(loop)
    counters, gauges = reporter.due(1.7 * REPORT_S) or ({}, {})
    assert (counters["generated_tokens"], gauges["running"]) == (20, 0)
    assert reporter.due(1.8 * REPORT_S) is None
    assert reporter.due(3.0 * REPORT_S) is not None
