"""I-45: what was cached and what was computed make the prompt, wherever and however it is told."""

from __future__ import annotations

import asyncio

import httpx
from server_fakes import FakeEngine, Script, byte_codec
from toy_engine import BLOCK, ask, cluster, greedy, prompt, request, run, toy, until

from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.router.local import LocalEngine
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

LIMIT = greedy(2 * BLOCK, ignore_eos=True)


async def conversation(engine):
    """(prompt, completion, cached) of each turn of three conversations with one beginning."""
    found = []
    for talk in range(3):
        tokens = list(prompt(9, 2 * BLOCK)) + list(prompt(talk, BLOCK + 3))
        for turn in range(3):
            answer = await ask(engine, request(f"c{talk}t{turn}", tokens, LIMIT))
            usage = answer.usage
            assert 0 <= usage.cached_tokens < usage.prompt_tokens == len(tokens)
            assert answer.cached == usage.cached_tokens
            found.append((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens))
            tokens += [*answer.tokens, *prompt(turn, 5)]
    return found


def test_hits_are_the_same_with_and_without_disaggregation_and_counters_agree():
    async def body():
        store = MemoryStore(toy().layout)
        local = LocalEngine(toy(), store=store)
        alone = await conversation(local)
        await local.close()
        shared = MemoryStore(toy().layout)
        shared.close = lambda: None
        async with cluster(prefills=2, decodes=2, store=lambda runner: shared) as it:
            apart = await conversation(it.engine)
            counters = [worker.service.load()[0] for worker in it.prefills]
            await until(it.idle)
        assert apart == alone
        assert sum(cached for _, _, cached in apart) > 0

        def total(name):
            return sum(c.get(name, 0) for c in counters)

        hit, miss = total("prefix_hit_tokens_memory"), total("prefix_miss_tokens")
        assert hit == sum(cached for _, _, cached in apart)
        assert hit + miss == sum(tokens for tokens, _, _ in apart)

    run(body())


def test_every_protocol_tells_the_same_hit():
    async def body():
        engine = FakeEngine(Script([[70, 71], [1]], cached=8))
        app = create_app(engine, byte_codec(), Settings())
        told = {}
        hello = [{"role": "user", "content": "hello there"}]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://localhost"
        ) as client:
            for path, body in (
                ("/v1/chat/completions", {"messages": hello}),
                ("/v1/responses", {"input": hello}),
                ("/v1/messages", {"messages": hello, "max_tokens": 9}),
                ("/v1/completions", {"prompt": "hello there"}),
            ):
                answer = await client.post(path, json={"model": "toy", **body})
                assert answer.status_code == 200, answer.text
                told[path] = answer.json()["usage"]
        lengths = [len(asked.token_ids) for asked in engine.requests]
        chat, responses, messages, completions = told.values()
        assert chat["prompt_tokens_details"]["cached_tokens"] == 8
        assert completions["prompt_tokens_details"]["cached_tokens"] == 8
        assert responses["input_tokens_details"]["cached_tokens"] == 8
        assert messages["cache_read_input_tokens"] == 8
        sums = [chat["prompt_tokens"], responses["input_tokens"]]
        sums += [messages["input_tokens"] + 8, completions["prompt_tokens"]]
        assert sums == lengths

    asyncio.run(body())
