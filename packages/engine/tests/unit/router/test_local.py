"""The in-process engine: the same promises as the remote one, without sockets."""

from __future__ import annotations

import asyncio

import pytest
from toy_engine import (
    BLOCK,
    LONG_TOKENS,
    TOY,
    GatedRunner,
    alone,
    ask,
    gated,
    greedy,
    prompt,
    request,
    run,
    toy,
    until,
)

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.types import TokensEvent
from deepinfer_engine.errors import (
    CapacityError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
)
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.router.local import LocalEngine

LONG = greedy(LONG_TOKENS, ignore_eos=True)


def test_many_streams_at_once_say_what_each_says_alone():
    prompts = {f"r{i}": prompt(i, 1 + 5 * i) for i in range(20)}

    async def body():
        engine = LocalEngine(toy(), store=MemoryStore(toy().layout))
        answers = await asyncio.gather(*(ask(engine, request(*item)) for item in prompts.items()))
        for tokens, answer in zip(prompts.values(), answers, strict=True):
            assert answer.tokens == alone(tokens, greedy())
        engine.loop.audit()
        assert engine.loop.unfinished == 0
        await engine.close()

    run(body())


def test_closing_the_iterator_frees_everything_within_a_step():
    runner = gated()

    async def body():
        engine = LocalEngine(runner)
        stream = engine.generate(request("r", prompt(1, 20), LONG))
        assert isinstance(await anext(stream), TokensEvent)
        runner.gate.clear()
        runner.entered.clear()
        await until(runner.entered.is_set)
        await stream.aclose()
        assert engine.loop.scheduler.pools.blocks.owned > 0, "the step in flight uses it"
        runner.gate.set()
        await until(lambda: engine.loop.scheduler.pools.blocks.owned == 0)
        assert engine.loop.scheduler.counters["aborts"] == 1
        await engine.close()

    run(body())


def test_a_timeout_ends_the_request_with_what_it_has():
    runner = gated()

    async def body():
        engine = LocalEngine(runner)
        tokens: list[int] = []
        end = None
        async for event in engine.generate(
            request("r", prompt(1, 20), greedy(3000, ignore_eos=True), timeout_s=0.2)
        ):
            if isinstance(event, TokensEvent):
                tokens += event.token_ids
            else:
                end = event
        assert end.reason == "abort"
        assert end.usage.completion_tokens >= len(tokens)
        await engine.close()

    run(body())


def test_a_failing_step_ends_every_stream_and_the_engine():
    class Broken(GatedRunner):
        def decode(self, rows):
            raise ArithmeticError("the device is gone")

    runner = Broken(**TOY)
    runner.gate.clear()

    async def body():
        engine = LocalEngine(runner)
        asked = [asyncio.create_task(ask(engine, request(f"r{i}", prompt(i, 9)))) for i in range(3)]
        await until(lambda: engine.loop.unfinished == 3)
        runner.gate.set()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(r) for r in results] == [EngineLost] * 3
        (status,) = await engine.status()
        assert not status.ready
        assert "device is gone" in status.detail
        with pytest.raises(EngineUnavailable):
            await ask(engine, request("later", (1, 2)))
        await engine.close()

    run(body())


def test_requests_in_flight_are_lost_when_the_engine_closes():
    async def body():
        engine = LocalEngine(toy())
        stream = engine.generate(request("r", prompt(1, 20), greedy(3000, ignore_eos=True)))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineLost):
            async for _ in stream:
                pass
        with pytest.raises(EngineUnavailable):
            await ask(engine, request("later", (1, 2)))

    run(body())


@pytest.mark.parametrize(
    ("tokens", "error"),
    [(prompt(1, 4096), PromptTooLong), (prompt(1, 3000), CapacityError), ((), RequestError)],
)
def test_what_can_never_run_is_refused(tokens, error):
    async def body():
        engine = LocalEngine(toy())
        with pytest.raises(error):
            await ask(engine, request("r", tokens))
        await engine.close()

    run(body())


def test_a_full_queue_is_unavailable_and_an_id_in_use_is_an_error():
    runner = gated()
    runner.gate.clear()

    async def body():
        engine = LocalEngine(runner, config=EngineConfig(max_num_seqs=1, max_queue=1))
        runs = asyncio.create_task(ask(engine, request("runs", (1,))))
        await until(runner.entered.is_set)
        waits = asyncio.create_task(ask(engine, request("waits", (2,))))
        await until(lambda: engine.loop.scheduler.gauges()["waiting"] == 1)
        with pytest.raises(EngineUnavailable):
            await ask(engine, request("refused", (3,)))
        with pytest.raises(RequestError, match="own id"):
            await ask(engine, request("waits", (3,)))
        runner.gate.set()
        assert (await runs).tokens == alone((1,), greedy())
        assert (await waits).tokens == alone((2,), greedy())
        await engine.close()

    run(body())


def test_status_counts_what_happened():
    async def body():
        engine = LocalEngine(toy(), store=MemoryStore(toy().layout))
        tokens = prompt(1, 3 * BLOCK + 1)
        for name in ("a", "b"):
            await ask(engine, request(name, tokens, greedy(10, ignore_eos=True)))
        (status,) = await engine.status()
        counters = status.counters
        assert (status.role, status.ready) == ("single", True)
        assert counters["prompt_tokens"] == 2 * len(tokens)
        assert counters["generated_tokens"] == 20
        assert counters["prefix_hit_tokens_memory"] == 3 * BLOCK
        assert counters["prefill_tokens"] == 2 * len(tokens) - 3 * BLOCK
        assert status.gauges["running"] == 0
        info = await engine.model_info()
        assert info.layout_hash == toy().layout.layout_hash
        await engine.flush()
        await engine.close()

    run(body())
