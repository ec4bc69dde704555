"""`deepinfer serve --responses-store sqlite:...`: a conversation that outlives the server."""

from __future__ import annotations

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
