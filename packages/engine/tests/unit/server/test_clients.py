"""The official client libraries, unmodified, against the server on a socket."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
from server_fakes import FakeEngine, Script
from server_socket import serving

from deepinfer_engine.errors import EngineLost, EngineUnavailable
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings
from deepinfer_recipe import SpecialToken

QUESTION = [{"role": "user", "content": "hi"}]
MARK = SpecialToken.Dsml.value
CALL = f"""Looking.

<{MARK} calls>
<{MARK} invoke name="weather">
<{MARK} parameter name="city" string="true">Oslo</{MARK} parameter>
<{MARK} parameter name="days" string="false">3</{MARK} parameter>
</{MARK} invoke>
</{MARK} calls>"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}


@pytest.fixture(scope="module")
def server():
    from server_fakes import byte_codec

    codec = byte_codec()
    answers = {"weather?": "hm</think>" + CALL, "hi": "let me see</think>hello"}

    def script(request):
        prompt = codec.detokenize(request.token_ids)
        if "fail" in prompt:
            return Script([[70]], raise_at=(0, EngineUnavailable("busy", 1)))
        if "dies" in prompt:
            return Script([[70], [71]], raise_at=(1, EngineLost("the worker went away")))
        text = next(answer for word, answer in answers.items() if word in prompt)
        ids = [*codec.tokenize(text), 1]
        return Script([ids[i : i + 4] for i in range(0, len(ids), 4)], cached=8)

    def build():
        engine = FakeEngine(script)
        return create_app(engine, codec, Settings())

    with serving(build) as running:
        yield running


@pytest.fixture
def chat(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.chat.completions


@pytest.fixture
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client.messages


def test_openai_whole_answer(chat):
    answer = chat.create(model="toy", messages=QUESTION)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("hello", "let me see")
    assert answer.usage.prompt_tokens_details.cached_tokens == 8


def test_openai_stream_with_usage(chat):
    content, usage = "", None
    for chunk in chat.create(
        model="toy", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
    assert content == "hello"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_openai_tool_call_whole_and_streamed(chat):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    ask = {"model": "toy", "messages": [{"role": "user", "content": "weather?"}], "tools": tools}
    answer = chat.create(**ask)
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Oslo", "days": 3},
    )
    arguments, names = "", []
    for chunk in chat.create(**ask, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments or ""
    assert (names, json.loads(arguments)) == (["weather"], {"city": "Oslo", "days": 3})


def test_openai_errors_have_their_own_classes(chat):
    with pytest.raises(openai.NotFoundError) as caught:
        chat.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        chat.create(model="toy", messages=QUESTION, temperature=5)
    assert "temperature" in str(caught.value)
    with pytest.raises(openai.InternalServerError) as caught:
        chat.create(model="toy", messages=[{"role": "user", "content": "fail"}])
    assert caught.value.status_code == 503


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def test_responses_whole_answer(responses):
    answer = responses.create(model="toy", input="hi", store=False)
    assert answer.id.startswith("resp_")
    assert answer.status == "completed"
    assert answer.output_text == "hello"
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage.input_tokens_details.cached_tokens == 8


def test_responses_stream_ends_in_the_same_response(responses):
    whole = responses.create(model="toy", input="hi")
    with responses.stream(model="toy", input="hi") as stream:
        numbers = [event.sequence_number for event in stream]
        final = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert final.output_text == "hello"
    assert final.usage == whole.usage


def test_responses_tool_loop(responses):
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    history = [{"role": "user", "content": "weather?"}]
    answer = responses.create(model="toy", input=history, tools=tools)
    call = next(item for item in answer.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 3}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    sent = [item.model_dump(exclude_none=True) for item in answer.output]
    again = responses.create(model="toy", input=[*history, *sent, result], tools=tools)
    assert again.usage.input_tokens > answer.usage.input_tokens


def test_responses_errors_name_the_field(responses):
    with pytest.raises(openai.NotFoundError):
        responses.create(model="gpt-9", input="hi")
    with pytest.raises(openai.BadRequestError, match="keeps no responses") as caught:
        responses.create(model="toy", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_responses_stream_tells_a_late_error_as_its_event(responses):
    *_, last = responses.create(model="toy", input="dies", stream=True)
    assert (last.type, last.message) == ("error", "the worker went away")


def test_openai_models(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["toy"]


THINKING = {"type": "enabled", "budget_tokens": 1024}


def test_anthropic_whole_answer(claude):
    answer = claude.create(model="toy", max_tokens=100, messages=QUESTION, thinking=THINKING)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[-1].text == "hello"
    assert answer.usage.cache_read_input_tokens == 8
    assert answer.stop_reason == "end_turn"


def test_anthropic_stream_ends_in_the_same_message(claude):
    whole = claude.create(model="toy", max_tokens=100, messages=QUESTION, thinking=THINKING)
    with claude.stream(model="toy", max_tokens=100, messages=QUESTION, thinking=THINKING) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "hello"
    assert [b.type for b in final.content] == [b.type for b in whole.content]
    assert final.usage.input_tokens == whole.usage.input_tokens
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.cache_read_input_tokens == 8


def test_anthropic_tool_use_whole_and_streamed(claude):
    tools = [{"name": "weather", "description": "w", "input_schema": SCHEMA}]
    ask = {
        "model": "toy",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "weather?"}],
        "tools": tools,
    }
    ask["max_tokens"] = 300
    answer = claude.create(**ask)
    assert answer.stop_reason == "tool_use"
    assert answer.content[-1].name == "weather"
    assert answer.content[-1].input == {"city": "Oslo", "days": 3}
    with claude.stream(**ask) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == {"city": "Oslo", "days": 3}


def test_anthropic_errors_have_their_own_classes(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.create(model="gpt-9", max_tokens=5, messages=QUESTION)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        claude.create(model="toy", max_tokens=5, messages=QUESTION, extra_body={"temperature": 5})
    with pytest.raises(anthropic.APIStatusError) as caught:
        claude.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": "fail"}])
    assert caught.value.status_code == 529


def test_anthropic_counts_and_models(server, claude):
    count = claude.count_tokens(model="toy", messages=QUESTION, thinking=THINKING).input_tokens
    answer = claude.create(model="toy", max_tokens=100, messages=QUESTION, thinking=THINKING)
    assert count == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["toy"]


def test_keys_reach_the_server_from_both_clients(tmp_path):
    from server_fakes import byte_codec

    codec = byte_codec()
    keys = tmp_path / "keys"
    keys.write_text("s3cret\n")

    def build():
        script = Script([[*codec.tokenize("</think>ok"), 1]])
        return create_app(FakeEngine(script), codec, Settings(api_key_file=keys))

    with serving(build) as running:
        for key, works in (("s3cret", True), ("wrong", False)):
            with openai.OpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0) as first:
                if works:
                    first.chat.completions.create(model="toy", messages=QUESTION)
                else:
                    with pytest.raises(openai.AuthenticationError):
                        first.chat.completions.create(model="toy", messages=QUESTION)
            with anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0) as second:
                if works:
                    second.messages.create(model="toy", max_tokens=9, messages=QUESTION)
                else:
                    with pytest.raises(anthropic.AuthenticationError):
                        second.messages.create(model="toy", max_tokens=9, messages=QUESTION)
