"""`deepinfer serve --responses-store sqlite:...`: a conversation that outlives the server."""

from __future__ import annotations

import json

import openai
import pytest


def test_a_conversation_goes_on_over_a_restart(start, tmp_path):
    where = f"sqlite:{tmp_path / 'responses.db'}"
    argv = ("--single-process", "--responses-store", where)
    ask = {"temperature": 0, "max_output_tokens": 24, "reasoning": {"effort": "none"}}
    first = start(*argv).wait_ready()
    with openai.OpenAI(base_url=first.url + "/v1", api_key="x", max_retries=0) as client:
        name = client.models.list().data[0].id
        one = client.responses.create(model=name, input="My name is Ann.", **ask)
    assert first.terminate() == 0
    second = start(*argv).wait_ready()
    with openai.OpenAI(base_url=second.url + "/v1", api_key="x", max_retries=0) as client:
        go_on = {"model": name, "input": "What is my name?", **ask}
        two = client.responses.create(previous_response_id=one.id, **go_on)
        whole = client.responses.create(
            **{
                **go_on,
                "input": [
                    {"role": "user", "content": "My name is Ann."},
                    {"role": "assistant", "content": one.output_text},
                    {"role": "user", "content": "What is my name?"},
                ],
            }
        )
        assert two.previous_response_id == one.id
        assert two.output_text == whole.output_text
        assert two.usage.input_tokens == whole.usage.input_tokens
        client.responses.delete(one.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(previous_response_id=one.id, **go_on)


def test_a_forced_tool_loop_sends_only_the_result(start):
    pytest.importorskip("xgrammar", reason="the grammar extra is not installed")
    server = start("--single-process", "--responses-store", "memory").wait_ready()
    tool = {
        "type": "function",
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    ask = {"tools": [tool], "reasoning": {"effort": "none"}, "temperature": 0}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        name = client.models.list().data[0].id
        first = client.responses.create(
            model=name, input="Add one.", tool_choice="required", max_output_tokens=200, **ask
        )
        calls = [item for item in first.output if item.type == "function_call"]
        assert [call.name for call in calls] == ["add"] * len(calls)
        assert all(0 <= json.loads(call.arguments)["a"] <= 99 for call in calls)
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
            for call in calls
        ]
        with client.responses.stream(
            model=name, input=results, previous_response_id=first.id, max_output_tokens=24, **ask
        ) as events:
            second = events.get_final_response()
        assert calls
        assert second.previous_response_id == first.id
        assert second.usage.input_tokens > first.usage.input_tokens
        kept = client.responses.input_items.list(second.id).data
        assert [item.output for item in kept] == ["7"] * len(calls)
