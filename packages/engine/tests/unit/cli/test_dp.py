"""`deepinfer generate --dp 2`: one file answered by two processes that share the experts."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deepinfer_engine.cli import replicated
from deepinfer_engine.cli.generate import run_generate
from deepinfer_engine.cli.launch import launched_engine
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, SamplingParams, TokensEvent
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.settings import Settings


def answer_all(folder: Path, name: str, **settings: object) -> list[str]:
    source, target = folder / "in.jsonl", folder / f"{name}.jsonl"
    source.write_text(
        "\n".join(
            json.dumps(
                {
                    "messages": [{"role": "user", "content": f"Tell me story {i}."}],
                    "thinking": {"type": "disabled"},
                    "max_tokens": 3 + i,
                    "temperature": i % 2,
                    "seed": i,
                }
            )
            for i in range(4)
        )
    )
    told = io.StringIO()
    chosen = Settings(dtype="float64", num_blocks=64, max_num_seqs=4, cache=False, **settings)
    code = run_generate(
        chosen, source, target, strict=False, concurrency=4, console=Console(file=told)
    )
    assert code == 0, told.getvalue()
    results = [json.loads(line) for line in target.read_text().splitlines()]
    return [r["response"]["choices"][0]["message"]["content"] for r in results]


def test_two_processes_write_what_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []

    class Seen(replicated.ReplicaLoop):
        def submit(self, request: GenerateRequest, key: str, *rest: object) -> None:
            super().submit(request, key, *rest)  # type: ignore[arg-type]
            given.append(key in self._elsewhere)

    monkeypatch.setattr(replicated, "ReplicaLoop", Seen)
    two = answer_all(tmp_path, "two", dp=2)
    assert two == answer_all(tmp_path, "one")
    assert {True, False} == set(given), "both processes had some"


def test_users_do_not_share_the_cache_of_the_other_process() -> None:
    """The salt of a request goes with it."""
    prompt = tuple(range(20, 300))
    greedy = SamplingParams(temperature=0, seed=1, max_tokens=2, ignore_eos=True)

    async def cached() -> list[int]:
        settings = Settings(single_process=True, dp=2, num_blocks=64, max_num_seqs=4,
                            cache_local=False)  # fmt: skip
        async with launched_engine(settings) as engine:
            long = SamplingParams(temperature=0, seed=1, max_tokens=80, ignore_eos=True)
            busy = GenerateRequest("busy", (5, 6), long)
            holds = engine.generate(busy)  # the first process, so that the others go elsewhere
            await anext(holds)
            found: list[int] = []
            for i, salt in enumerate(("ann", "ann", "bob")):
                request = GenerateRequest(f"r{i}", prompt, greedy, salt=salt)
                async for event in engine.generate(request):
                    assert isinstance(event, TokensEvent | FinishEvent)
                    if isinstance(event, FinishEvent):
                        found.append(event.usage.cached_tokens)
            await holds.aclose()
            return found

    first, again, other = asyncio.run(cached())
    assert first == 0
    assert again > 0
    assert other == 0


def test_status_and_metrics_tell_of_every_process() -> None:
    def asked(name: str, tokens: int) -> GenerateRequest:
        greedy = SamplingParams(temperature=0, seed=1, max_tokens=tokens, ignore_eos=True)
        return GenerateRequest(name, (5, 6, len(name)), greedy)

    async def statuses() -> list[list[WorkerStatus]]:
        settings = Settings(single_process=True, dp=2, num_blocks=64, max_num_seqs=4, cache=False)
        async with launched_engine(settings) as engine:
            found = [await engine.status()]

            async def ended(name: str, tokens: int) -> None:
                async for _ in engine.generate(asked(name, tokens)):
                    pass

            await asyncio.gather(ended("one", 9), ended("other", 7))
            found.append(await engine.status())
            # Given up, they are forgotten wherever they ran.
            first, second = engine.generate(asked("a", 200)), engine.generate(asked("bb", 200))
            await asyncio.gather(anext(first), anext(second))
            await first.aclose()
            await second.aclose()
            async with asyncio.timeout(60):
                while any(w.gauges["running"] for w in await engine.status()):
                    await asyncio.sleep(0.01)
            return found

    before, after = asyncio.run(statuses())
    for told in (before, after):
        assert [w.name for w in told] == ["local", "local-1"]
        assert all(w.ready and w.role == "single" for w in told)
        assert len({w.pid for w in told}) == 2
    assert sorted(w.counters["generated_tokens"] for w in after) == [7, 9]
    assert [w.counters["prompt_tokens"] for w in after] == [3, 3]
    assert [w.gauges["blocks_capacity"] for w in after] == [63, 63]
    assert [w.gauges["running"] for w in after] == [0, 0]
    rendered = Metrics().render(after, "")[0].decode()
    samples = dict(line.rsplit(" ", 1) for line in rendered.splitlines() if line[0] != "#")
    name = 'deepinfer_worker_generated_tokens_total{role="single",worker="%s"}'
    assert {float(samples[name % w.name]) for w in after} == {7.0, 9.0}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "dp 2 is about one process: add --single-process"),
        ({"single_process": True, "overlap": True}, "leave out overlap"),
    ],
)
def test_what_does_not_go_together_is_told_before_anything_starts(settings, told) -> None:
    async def start() -> None:
        async with launched_engine(Settings(dp=2, **settings)):
            pass

    with pytest.raises(ConfigError, match=told):
        asyncio.run(start())
