"""A dense model through router, prefill and decode: identity, hits, protocols, constraints."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest
from dense_checkpoint import write_dense

from deepinfer_engine.cli.launch import launched_engine
from deepinfer_engine.core.types import FinishEvent, GenerateRequest, SamplingParams, Usage
from deepinfer_engine.settings import Settings

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
PROMPTS = [
    tuple(np.random.default_rng(i).integers(3, 320, 100 + 13 * i).tolist()) for i in range(16)
]
TOOL = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["town"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_dense(
        tmp_path_factory.mktemp("dense") / "tiny-llama", max_position_embeddings=4096
    )
    config = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9}))
    return path


def run(folder: Path, tmp_path: Path, rounds: int, **changes: object) -> list[list]:
    """(tokens, usage) of every prompt, once a round."""
    values = {
        "model": str(folder),
        "dtype": "float64",
        "cache_dir": tmp_path / "kv",
        "threads": 1,
        "log_level": "warning",
    }
    settings = Settings.model_validate({**values, **changes})

    async def one(engine, key: str, ids: tuple[int, ...]) -> tuple[tuple[int, ...], Usage]:
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, seed=0)
        tokens: list[int] = []
        async for event in engine.generate(GenerateRequest(key, ids, sampling)):
            if isinstance(event, FinishEvent):
                return tuple(tokens), event.usage
            tokens.extend(event.token_ids)
        raise AssertionError("no finish event")

    async def everything() -> list[list]:
        async with launched_engine(settings) as engine:
            return [
                await asyncio.gather(*(one(engine, f"{t}-{i}", p) for i, p in enumerate(PROMPTS)))
                for t in range(rounds)
            ]

    return asyncio.run(everything())


def test_processes_hits_and_parking_do_not_change_greedy_text(folder: Path, tmp_path: Path) -> None:
    (plain,) = run(folder, tmp_path, 1, single_process=True, cache=False)
    cold, warm = run(folder, tmp_path, 2)
    # Memory for a few at a time: the others are parked and come back.
    (tight,) = run(folder, tmp_path, 1, single_process=True, cache=False, num_blocks=12)
    texts = [[tokens for tokens, _ in outputs] for outputs in (plain, cold, warm, tight)]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    for (_, usage), ids in zip(warm, PROMPTS, strict=True):
        assert usage.cached_tokens == (len(ids) - 1) // 128 * 128


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory, running_server):
    cache = tmp_path_factory.mktemp("kv")
    with running_server("--model", str(folder), "--dtype", "float64", cache_dir=cache) as one:
        yield one


def test_a_conversation_over_the_three_protocols(server) -> None:
    long = "w1 w2 w3 " * 60
    ask = [{"role": "user", "content": long}]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny-llama"]
        first = client.chat.completions.create(
            model="tiny-llama", messages=ask, max_tokens=150, temperature=0
        )
        answer = first.choices[0].message.content
        turns = [*ask, {"role": "assistant", "content": answer}, {"role": "user", "content": "w9"}]
        second = client.chat.completions.create(
            model="tiny-llama", messages=turns, max_tokens=5, temperature=0
        )
        assert second.usage.prompt_tokens_details.cached_tokens >= 128
        pieces = client.chat.completions.create(
            model="tiny-llama", messages=ask, max_tokens=150, temperature=0, stream=True
        )
        streamed = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert streamed == answer
        kept = client.responses.create(
            model="tiny-llama", input=long, max_output_tokens=150, temperature=0
        )
        assert kept.output_text == answer
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model="tiny-llama", messages=ask, max_tokens=150, extra_body={"temperature": 0}
        )
        assert "".join(b.text for b in said.content if b.type == "text") == answer


def test_a_tool_loop_under_a_constraint(server) -> None:
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    tool = {"name": "weather", "description": "", "parameters": TOOL, "strict": True}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "w1"}],
            tools=[{"type": "function", "function": tool}],
            tool_choice="required",
            max_tokens=120,
        )
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        again = client.chat.completions.create(
            model="tiny-llama",
            messages=[
                {"role": "user", "content": "w1"},
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
                result,
            ],
            tools=[{"type": "function", "function": tool}],
            tool_choice="none",
            max_tokens=5,
        )
        assert again.choices[0].message.tool_calls is None
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model="tiny-llama",
            messages=[{"role": "user", "content": "w1"}],
            tools=[{"name": "weather", "description": "", "input_schema": TOOL}],
            tool_choice={"type": "any"},
            max_tokens=120,
        )
        uses = [b for b in said.content if b.type == "tool_use"]
        assert uses  # a random model calls again and again, until its tokens cut the last call
        whole = uses[:-1] if said.stop_reason == "max_tokens" else uses
        assert all(use.input["town"] in ("Rome", "Oslo") for use in whole)


def test_a_base_model_without_a_template_completes_and_does_not_chat(
    folder: Path, tmp_path: Path, running_server
) -> None:
    base = write_dense(tmp_path / "base")
    with running_server("--model", str(base), "--single-process", cache_dir=None) as one:
        body = {"model": "base", "messages": [{"role": "user", "content": "w1"}]}
        refused = one.post("/v1/chat/completions", body)
        assert refused.status_code == 400
        assert "no chat template" in refused.json()["error"]["message"]
        done = one.post("/v1/completions", {"model": "base", "prompt": "w1", "max_tokens": 3})
        assert done.status_code == 200
