"""Greedy text does not depend on how the engine runs: processes, cache and drafts change nothing.

In float64, where a difference of rounding order cannot flip an argmax or a quantised code.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.cli.generate import Line, answers
from deepinfer_engine.cli.launch import build_codec, launched_engine
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, SamplingParams, Usage
from deepinfer_engine.settings import Settings

PROMPTS = 20
OUTPUT_TOKENS = 64


def prompts() -> list[tuple[int, ...]]:
    """Prompts of 130 to 280 ids: every one holds a whole block, few end on a boundary."""
    rng = np.random.default_rng(11)
    lengths = rng.integers(130, 281, size=PROMPTS)
    lengths[:4] = (128, 129, 256, 257)
    return [tuple(rng.integers(20, 1200, size=n).tolist()) for n in lengths]


def run(settings: Settings, rounds: int = 1) -> list[list[tuple[tuple[int, ...], Usage]]]:
    """The outputs of all prompts, once a round on the same engine."""

    async def one(engine, index: int, ids: tuple[int, ...], turn: int):
        sampling = SamplingParams(
            temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, seed=0
        )
        tokens: list[int] = []
        request = GenerateRequest(f"r{turn}-{index}", ids, sampling)
        async for event in engine.generate(request):
            if isinstance(event, FinishEvent):
                return tuple(tokens), event.usage
            tokens.extend(event.token_ids)
        raise AssertionError("no finish event")

    async def everything():
        async with launched_engine(settings) as engine:
            return [
                await asyncio.gather(*(one(engine, i, p, t) for i, p in enumerate(prompts())))
                for t in range(rounds)
            ]

    return asyncio.run(everything())


def settings(tmp_path: Path, **changes: object) -> Settings:
    values = {
        "dtype": "float64",
        "cache_dir": tmp_path / "kv",
        "max_num_seqs": 16,
        "num_blocks": 128,
        "threads": 1,
        "log_level": "warning",
    }
    return Settings.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, ...]]:
    """One process, no cache, no drafts."""
    alone = settings(tmp_path_factory.mktemp("a"), single_process=True, cache=False, nextn=0)
    (outputs,) = run(alone)
    assert all(len(tokens) == OUTPUT_TOKENS for tokens, _ in outputs)
    assert len({tokens for tokens, _ in outputs}) > 1
    return [tokens for tokens, _ in outputs]


def test_drafts_do_not_change_greedy_text(plain: list[tuple[int, ...]], tmp_path: Path) -> None:
    (outputs,) = run(settings(tmp_path, single_process=True, cache=False))
    assert [tokens for tokens, _ in outputs] == plain
    assert sum(usage.drafted_tokens for _, usage in outputs) > 0


def test_disaggregation_and_cache_hits_do_not_change_greedy_text(
    plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    cold, warm = run(settings(tmp_path), rounds=2)
    assert [tokens for tokens, _ in cold] == plain
    assert [tokens for tokens, _ in warm] == plain
    for (_, usage), ids in zip(warm, prompts(), strict=True):
        # Whole blocks, and the last prompt token is always computed.
        assert usage.cached_tokens == (len(ids) - 1) // 128 * 128

    (without_drafts,) = run(settings(tmp_path, nextn=0))
    assert [tokens for tokens, _ in without_drafts] == plain
    assert all(
        usage.cached_tokens > 0
        for (_, usage), p in zip(without_drafts, prompts(), strict=True)
        if len(p) > 128
    )


QUESTIONS = (
    "Tell me a story about a fox.",
    "Hello, my name is Ana.",
    "What is the capital of Italy?",
    "Count these things: a kite, a drum, a lamp.",
)


def test_temperature_0_over_http_is_the_same_argmax(start, tmp_path: Path) -> None:
    """Three processes, drafts and cache behind HTTP, against one process with none of them."""
    bodies = [
        {
            "model": "deepinfer-demo",
            "temperature": 0,
            "max_tokens": 64,
            "messages": [{"role": "user", "content": question}],
        }
        for question in QUESTIONS
    ]

    async def alone() -> list[dict]:
        plain = settings(tmp_path, single_process=True, cache=False, nextn=0)
        lines = [Line(i + 1, json.dumps(body)) for i, body in enumerate(bodies)]
        async with launched_engine(plain) as engine:
            return [r async for _, r in answers(engine, build_codec(plain), lines, 4)]

    expected = [result["response"]["choices"] for result in asyncio.run(alone())]
    server = start("--dtype", "float64", cache_dir=tmp_path / "kv").wait_ready()
    for _ in range(2):  # the second round may hit what the first one stored
        over_http = [server.post("/v1/chat/completions", body).json() for body in bodies]
        assert [answer["choices"] for answer in over_http] == expected
