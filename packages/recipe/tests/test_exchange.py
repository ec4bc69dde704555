"""The server's way through the codec, and what the extended profile adds to the reference."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionError,
    ConversionOptions,
    Exchange,
    MessagesRequest,
    ReasoningContentBehavior,
    RecipeError,
    RequestParseError,
    ResponsesRequest,
    error_response,
)

MODEL = "DeepSeek-V4.1-Flash"
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="true">x</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


def chat(**fields: Any) -> Exchange:
    return exchange("chat", {"messages": [USER], **fields})


def exchange(protocol: Any, body: dict[str, Any]) -> Exchange:
    calls = iter(range(100))
    return Exchange(
        protocol,
        {"model": MODEL, **body},
        id="id-1",
        created=5,
        call_ids=lambda index: f"call-{next(calls)}-{index}",
    )


def run(opened: Exchange, text: str, reason: Any = "stop") -> list[str]:
    frames = opened.answer.ready(prompt_tokens=10, cached_tokens=4)
    for piece in (text[:7], text[7:]):
        frames += opened.answer.text(piece, tokens=2)
    return frames + opened.answer.finish(reason)


def payloads(frames: list[str]) -> list[dict[str, Any]]:
    found = [frame.split("data: ", 1)[1].strip() for frame in frames]
    return [json.loads(data) for data in found if data != "[DONE]"]


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("chat", {"messages": [USER], "stream": True}),
        ("responses", {"input": "hi", "stream": True}),
        (
            "messages",
            {
                "messages": [USER],
                "stream": True,
                "max_tokens": 9,
                "thinking": {"type": "enabled"},
            },
        ),
    ],
)
def test_stream_and_whole_response_tell_the_same(protocol: str, body: dict[str, Any]) -> None:
    opened = exchange(protocol, body)
    frames = run(opened, "thinking</think>\n\nanswer")
    assert all(frame.endswith("\n\n") for frame in frames)
    text = json.dumps(opened.response())
    assert '"thinking"' in text
    assert '"answer"' in text
    assert (frames[-1] == "data: [DONE]\n\n") == (protocol == "chat")
    assert opened.stream


def test_usage_of_chat_is_a_chunk_of_its_own_and_counts_thinking() -> None:
    opened = chat(stream=True, stream_options={"include_usage": True})
    last = payloads(run(opened, "hm, well</think>ok"))[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert opened.response()["usage"] == last["usage"]


def test_stop_sequence_finishes_the_answer_early() -> None:
    opened = chat(stop="END", thinking={"type": "disabled"})
    answer = opened.answer
    answer.ready(prompt_tokens=1)
    answer.text("fine EN")
    assert not answer.finished
    answer.text("D and more")
    assert answer.finished
    assert answer.text("ignored") == []
    assert answer.finish("length") == []
    choice = opened.response()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("fine ", "stop")


def test_several_answers_share_one_prompt_in_the_usage() -> None:
    opened = chat(n=3, stream=True, stream_options={"include_usage": True}, reasoning_effort="none")
    frames: list[str] = []
    for number, answer in enumerate(opened.answers):
        frames += answer.ready(prompt_tokens=10)
        frames += answer.text(f"answer {number}", tokens=3)
        frames += answer.finish()
    response = opened.response()
    contents = [choice["message"]["content"] for choice in response["choices"]]
    assert contents == ["answer 0", "answer 1", "answer 2"]
    assert (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]) == (10, 9)
    assert frames.count("data: [DONE]\n\n") == 1
    assert frames[-1] == "data: [DONE]\n\n"
    assert sum(bool(p.get("usage")) for p in payloads(frames)) == 1


def test_tool_call_comes_out_in_every_protocol() -> None:
    opened = chat(tools=[CHAT_TOOL], reasoning_effort="none")
    run(opened, CALL)
    call = opened.response()["choices"][0]["message"]["tool_calls"][0]
    assert call["id"] == "call-0-0"
    assert json.loads(call["function"]["arguments"]) == {"a": "x"}
    opened = exchange(
        "messages",
        {
            "messages": [USER],
            "tools": [{"name": "f", "input_schema": SCHEMA}],
            "thinking": {"type": "disabled"},
        },
    )
    run(opened, CALL)
    assert opened.response()["content"] == [
        {"type": "tool_use", "id": "call-0-0", "name": "f", "input": {"a": "x"}}
    ]
    assert opened.response()["stop_reason"] == "tool_use"
    opened = exchange(
        "responses",
        {
            "input": "hi",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "reasoning": {"effort": "none"},
        },
    )
    run(opened, CALL, "length")
    item = opened.response()["output"][0]
    assert (item["type"], item["status"]) == ("function_call", "completed")


def test_required_call_opens_the_block_in_the_prompt() -> None:
    opened = chat(tools=[CHAT_TOOL], tool_choice="required", reasoning_effort="none")
    assert opened.prompt.endswith("</think>\n\n<｜DSML｜ calls>\n")
    run(opened, CALL.split("calls>\n", 1)[1])
    assert opened.response()["choices"][0]["finish_reason"] == "tool_calls"


def test_explicit_sampling_is_honoured_in_thinking_mode() -> None:
    options = chat(temperature=0.25, top_p=0.5, frequency_penalty=1.5).request.inference_options
    assert (options.temperature, options.top_p, options.frequency_penalty) == (0.25, 0.5, 1.5)
    parity = ChatCompletionRequest({"model": MODEL, "messages": [USER], "temperature": 0.25})
    assert parity.convert(ConversionOptions()).inference_options.temperature == 1.0


def test_modern_chat_fields_are_understood() -> None:
    opened = chat(
        messages=[{"role": "developer", "content": "be kind"}, USER],
        max_completion_tokens=77,
        tools=[CHAT_TOOL, {"type": "function", "function": {"name": "g"}}],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "g"}}],
            },
        },
        user="someone",
    )
    assert opened.request.inference_options.max_tokens == 77
    assert [tool.name for tool in opened.request.conversation.tools] == ["g"]
    assert "be kind" in opened.prompt
    assert opened.request.user == "someone"


def test_final_assistant_message_of_messages_is_continued() -> None:
    body = {
        "messages": [USER, {"role": "assistant", "content": "Once upon"}],
        "thinking": {"type": "disabled"},
    }
    opened = exchange("messages", body)
    assert opened.prompt.endswith("</think>Once upon")
    run(opened, " a time")
    assert opened.response()["content"] == [{"type": "text", "text": " a time"}]
    parity = MessagesRequest({"model": MODEL, **body}).convert(ConversionOptions())
    assert not parity.conversation.messages[-1].prefix


def test_messages_knows_any_custom_and_output_format() -> None:
    tool = {"type": "custom", "name": "f", "input_schema": SCHEMA, "strict": True}
    opened = exchange(
        "messages",
        {
            "messages": [USER],
            "tools": [tool],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"},
        },
    )
    assert opened.request.conversation.tool_choice == "required"
    assert opened.request.conversation.tools[0].strict
    schema = {"type": "json_schema", "schema": SCHEMA}
    opened = exchange("messages", {"messages": [USER], "output_config": {"format": schema}})
    constraint = opened.request.inference_options.output_constraint
    assert constraint is not None
    assert json.loads(constraint.schema) == SCHEMA


def test_any_custom_tool_takes_one_string() -> None:
    opened = exchange(
        "responses",
        {
            "input": "hi",
            "tools": [{"type": "custom", "name": "shell", "description": "Run it."}],
            "reasoning": {"effort": "none"},
        },
    )
    run(
        opened,
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="shell">\n'
        '<｜DSML｜ parameter name="input" string="true">ls "a"\n</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    )
    item = opened.response()["output"][0]
    assert (item["type"], item["input"]) == ("custom_tool_call", 'ls "a"\n')


def test_strict_tool_keeps_the_definitions_it_refers_to() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}},
        "$defs": {"x": {"type": "string", "minLength": 3}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    parameters = chat(tools=[tool]).request.conversation.tools[0].parameters
    assert parameters["$defs"] == {"x": {"type": "string", "minLength": 3}}
    with pytest.raises(ConversionError):
        ChatCompletionRequest({"model": MODEL, "messages": [USER], "tools": [tool]}).convert(
            ConversionOptions()
        )


def test_repairs_of_tool_calls_are_reported() -> None:
    opened = chat(tools=[CHAT_TOOL], reasoning_effort="none")
    run(opened, CALL[: CALL.index("x<") + 1], "length")
    arguments = opened.response()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"a": "x"}
    assert opened.answer.tool_call_repairs == ["a call cut short was closed"]


@pytest.mark.parametrize(
    ("protocol", "body", "status", "param"),
    [
        ("chat", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("chat", {"messages": [USER], "temperature": 9}, 400, "temperature"),
        ("chat", {"messages": [USER], "model": "other"}, 404, "model"),
        ("chat", {"messages": [USER], "n": 99}, 400, "n"),
        ("chat", {"messages": [USER], "max_completion_tokens": "x"}, 400, "max_completion_tokens"),
        ("chat", {"messages": [USER], "stop": ["a", ""]}, 400, "stop[1]"),
        ("responses", {"input": [{"role": "user", "content": 3}]}, 400, "input[0].content"),
        ("responses", {"input": "x", "tools": [{"type": "function"}]}, 400, "tools[0].name"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ],
)
def test_error_names_the_field_in_the_shape_of_its_protocol(
    protocol: Any, body: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        exchange(protocol, body)
    got_status, payload = error_response(protocol, caught.value)
    assert got_status == status
    assert caught.value.param == param  # type: ignore[union-attr]
    if protocol == "messages":
        assert payload["type"] == "error"
        assert payload["error"]["type"] == "invalid_request_error"
    else:
        assert payload["error"]["param"] == param


def test_error_without_fault_of_the_client_tells_nothing() -> None:
    status, payload = error_response("chat", RecipeError("secret path"))
    assert status == 500
    assert "secret" not in json.dumps(payload)


def test_request_can_be_converted_once() -> None:
    for request in (
        ChatCompletionRequest({"model": MODEL, "messages": [USER]}),
        MessagesRequest({"model": MODEL, "messages": [USER]}),
        ResponsesRequest({"model": MODEL, "input": "x"}),
    ):
        assert request.model == MODEL
        request.convert(ConversionOptions())
        with pytest.raises(RuntimeError, match="already converted"):
            request.convert(ConversionOptions())


def test_unknown_roles_stay_parse_errors_in_the_parity_profile() -> None:
    body = {"model": MODEL, "messages": [{"role": "developer", "content": "x"}]}
    with pytest.raises(RequestParseError, match="developer"):
        ChatCompletionRequest(body)


def test_reasoning_must_come_back_only_behind_the_last_user_message() -> None:
    options = ConversionOptions().with_reasoning_content_behavior(ReasoningContentBehavior.Reject)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    loop = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]

    def accepts(messages: list[Any], **fields: Any) -> bool:
        request = ChatCompletionRequest({"model": MODEL, "messages": messages, **fields})
        try:
            request.convert(options)
        except ConversionError as error:
            return "`reasoning_content`" not in error.message
        return True

    assert not accepts(loop)
    assert accepts([*loop, USER])
    assert accepts(loop, thinking={"type": "disabled"})
    answer = {"role": "assistant", "content": "a"}
    assert accepts([USER, answer])
    assert not accepts([USER, answer], tools=[CHAT_TOOL])


def test_schema_that_points_elsewhere_is_refused_without_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("tried to connect")

    monkeypatch.setattr("socket.socket.connect", refuse)
    schema = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}
    with pytest.raises(ConversionError, match="Retrieval is disabled, cannot fetch"):
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
