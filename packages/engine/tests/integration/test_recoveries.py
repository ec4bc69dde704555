"""Greedy text in float64 is the same however a window came back; bounded replay tells how far off.

Two prefill workers, one of them killed, everything restarted: the answers are those of one process
that has no cache at all.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.cli.launch import launched_engine
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, SamplingParams, Usage
from deepinfer_engine.router.client import EngineClient
from deepinfer_engine.settings import Settings

BLOCK = 128
LENGTHS = (1290, 1420)
"""Longer than an exact replay of the embedded model, 1,023 tokens, by a block and more."""
OUTPUT = 20
Said = tuple[tuple[int, ...], Usage]
PROMPTS = [
    tuple(np.random.default_rng(seed).integers(20, 1200, size=n).tolist())
    for seed, n in enumerate(LENGTHS)
]


def settings(path: Path, **changes: object) -> Settings:
    values = {
        "dtype": "float64",
        "cache_dir": path / "kv",
        "max_num_seqs": 4,
        "num_blocks": 128,
        "threads": 1,
        "log_level": "warning",
        "persist_state": "none",
        # A busy machine shall find them, too, and load them however slow its disk was before.
        "window_deadline_ms": 10_000,
        "prefill_rate": 1.0,
    }
    return Settings.model_validate({**values, **changes})


async def ask(engine: EngineClient, ids: Sequence[int], name: str) -> Said:
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, seed=0)
    tokens: list[int] = []
    async for event in engine.generate(GenerateRequest(name, tuple(ids), sampling)):
        if isinstance(event, FinishEvent):
            return tuple(tokens), event.usage
        tokens.extend(event.token_ids)
    raise AssertionError("no finish event")


async def all_of(engine: EngineClient, prompts: Sequence[Sequence[int]], name: str) -> list[Said]:
    return [await ask(engine, ids, f"{name}-{i}") for i, ids in enumerate(prompts)]


def turns(first: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The next prompt of each conversation."""
    return [(*ids, *said, 21, 22, 23) for ids, said in zip(PROMPTS, first, strict=True)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[int, ...]]]:
    """Both turns in one process without cache and drafts."""

    async def run() -> list[list[tuple[int, ...]]]:
        alone = settings(tmp_path_factory.mktemp("a"), single_process=True, cache=False, nextn=0)
        async with launched_engine(alone) as engine:
            first = [said for said, _ in await all_of(engine, PROMPTS, "a")]
            second = [said for said, _ in await all_of(engine, turns(first), "b")]
            return [first, second]

    return asyncio.run(run())


def windows(said: Sequence[Said]) -> set[str | None]:
    return {usage.window for _, usage in said}


def texts(said: Sequence[Said]) -> list[tuple[int, ...]]:
    return [tokens for tokens, _ in said]


async def killed(engine: EngineClient) -> None:
    """SIGKILL to one prefill worker; returns when another process has its place."""
    before = {s.pid: s.name for s in await engine.status() if s.role == "prefill"}
    victim = next(pid for pid in before if pid)
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(60):
        while True:
            now = [s for s in await engine.status() if s.role == "prefill"]
            if all(s.ready for s in now) and victim not in {s.pid for s in now}:
                return
            await asyncio.sleep(0.1)


def test_two_workers_one_killed_and_a_restart_change_no_token(
    plain: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    first, second = plain
    following = turns(first)

    async def workers() -> None:
        async with launched_engine(settings(tmp_path, prefill_workers=2)) as engine:
            one = await all_of(engine, PROMPTS, "one")
            assert texts(one) == first
            assert windows(one) == {None}
            await engine.flush()  # blocks are written behind the answers
            two = await all_of(engine, following, "two")
            assert texts(two) == second
            assert windows(two) <= {"local", "peer"}, "the decode worker has those of the answers"
            for _, usage in two:
                assert usage.cached_tokens == (usage.prompt_tokens - 3 - 1) // BLOCK * BLOCK
            await engine.flush()
            await killed(engine)
            again = await all_of(engine, following, "again")
            assert texts(again) == second
            assert windows(again) <= {"local", "peer", "exact_replay"}

    async def restarted() -> None:
        alone = settings(tmp_path, single_process=True)
        async with launched_engine(alone) as engine:
            said = await all_of(engine, following, "later")
            assert texts(said) == second
            assert windows(said) == {"exact_replay"}
            assert {usage.replayed_tokens for _, usage in said} == {1023}

    asyncio.run(workers())
    asyncio.run(restarted())


def test_bounded_replay_tells_how_far_its_text_is_off(
    plain: list[list[tuple[int, ...]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = plain

    async def run(recovery: str) -> list[Said]:
        alone = settings(tmp_path, single_process=True, window_recovery=recovery)
        async with launched_engine(alone) as engine:
            if recovery == "exact":
                return await all_of(engine, PROMPTS, "fill")
            return await all_of(engine, turns(first), "bounded")

    assert texts(asyncio.run(run("exact"))) == first
    said = asyncio.run(run("bounded"))
    assert windows(said) == {"bounded_replay"}
    assert {usage.replayed_tokens for _, usage in said} == {BLOCK}
    same = sum(
        a == b
        for mine, whole in zip(texts(said), second, strict=True)
        for a, b in zip(mine, whole, strict=True)
    )
    with capsys.disabled():
        print(
            f"\nbounded replay: {same} of {OUTPUT * len(second)} greedy tokens as of an exact one"
        )
