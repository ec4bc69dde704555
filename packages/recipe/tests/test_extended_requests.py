"""What the extended profile accepts beyond the reference, and how it refuses the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionError,
    ConversionOptions,
    Exchange,
    InputGrammar,
    RecipeError,
    RequestParseError,
    ResponsesRequest,
    error_response,
)

MODEL = "DeepSeek-V4.1-Flash"


def opened(protocol: Any, body: dict[str, Any]) -> Exchange:
    return Exchange(protocol, {"model": MODEL, **body}, id="x", created=0)


def refused(protocol: Any, body: dict[str, Any]) -> dict[str, Any]:
    with pytest.raises(RecipeError) as caught:
        opened(protocol, body)
    status, payload = error_response(protocol, caught.value)
    assert status == 400
    return payload["error"]


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("protocol", "body", "param"),
    [
        ("chat", {"messages": user({"type": "input_audio"})}, "messages[0].content[0]"),
        ("chat", {"messages": user({"type": "video_url"})}, "messages[0].content[0]"),
        ("responses", {"input": user({"type": "input_audio"})}, "input[0].content[0]"),
        ("responses", {"input": user({"type": "input_video"})}, "input[0].content[0]"),
        ("messages", {"messages": user({"type": "audio"})}, None),
        ("messages", {"messages": user({"type": "video"})}, None),
    ],
)
def test_sound_and_moving_pictures_are_refused_by_name(
    protocol: Any, body: dict[str, Any], param: str | None
) -> None:
    error = refused(protocol, body)
    assert "audio and video are not supported" in error["message"]
    assert "content[0]" in error["message"]
    assert error.get("param") == param


def test_an_unknown_or_missing_kind_tells_the_kinds_there_are() -> None:
    error = refused("chat", {"messages": [{"role": "robot", "content": "x"}]})
    assert "unknown role `robot`, expected one of `system`" in error["message"]
    error = refused("chat", {"messages": user({"text": "x"})})
    assert "missing field `type` (at messages[0].content[0])" in error["message"]


GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}


def custom(format: Any) -> dict[str, Any]:
    return {"input": "x", "tools": [{"type": "custom", "name": "shell", "format": format}]}


def test_the_grammar_of_a_custom_tool_reaches_the_constraint_and_not_the_prompt() -> None:
    plain, bound = (
        opened("responses", custom({"type": "text"})),
        opened("responses", custom(GRAMMAR)),
    )
    assert bound.prompt == plain.prompt
    [tool] = bound.request.conversation.tools
    assert tool.input_grammar == InputGrammar("lark", 'start: "a"+')
    constraint = bound.request.inference_options.output_constraint
    assert constraint is not None
    [entry] = json.loads(constraint.schema)
    assert entry["input_grammar"] == {"syntax": "lark", "definition": 'start: "a"+'}


@pytest.mark.parametrize(
    ("format", "param"),
    [
        ("text", "tools[0].format"),
        ({"type": "json"}, "tools[0].format"),
        ({**GRAMMAR, "syntax": "ebnf"}, "tools[0].format.syntax"),
        ({**GRAMMAR, "definition": ""}, "tools[0].format.definition"),
        ({**GRAMMAR, "definition": 3}, "tools[0].format.definition"),
    ],
)
def test_a_custom_tool_format_that_is_none_is_named(format: Any, param: str) -> None:
    assert refused("responses", custom(format))["param"] == param


ALLOWED = {
    "input": "x",
    "reasoning": {"effort": "none"},
    "tools": [{"type": "function", "name": name} for name in ("a", "b")],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "b"}],
    },
}


def test_responses_may_allow_some_of_the_tools() -> None:
    exchange = opened("responses", ALLOWED)
    conversation = exchange.request.conversation
    assert [tool.name for tool in conversation.tools] == ["b"]
    assert conversation.tool_choice == "required"
    answer = exchange.answer
    answer.finish()
    assert exchange.response()["tool_choice"] == ALLOWED["tool_choice"]


def test_parity_knows_neither_allowed_tools_nor_other_custom_tools() -> None:
    with pytest.raises(RequestParseError):
        ResponsesRequest({"model": MODEL, **ALLOWED})
    with pytest.raises(RequestParseError):
        ChatCompletionRequest(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "x"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": []},
                },
            }
        )
    request = ResponsesRequest({"model": MODEL, **custom(None)})
    with pytest.raises(ConversionError, match="Only 'apply_patch'"):
        Exchange("responses", {"model": MODEL, **custom(None)}, id="x", profile="parity")
    assert request.model == MODEL


@pytest.mark.parametrize("name", ["user", "user_id"])
@pytest.mark.parametrize("value", [5, ["a"], {"id": 1}, False])
def test_an_end_user_that_is_no_string_is_refused_by_name(name: str, value: Any) -> None:
    error = refused("chat", {"messages": [{"role": "user", "content": "hi"}], name: value})
    assert error["param"] == name
    assert "expected a string" in error["message"]


@pytest.mark.parametrize(
    ("protocol", "asked"),
    [
        ("chat", {"stop": "x" * 1001}),
        ("chat", {"stop": ["END", "x" * 1001]}),
        ("messages", {"stop_sequences": ["x" * 1001], "max_tokens": 8}),
    ],
)
def test_a_stop_sequence_has_a_longest_length(protocol: Any, asked: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **asked}
    assert "at most 1000" in refused(protocol, body)["message"]
    key = "stop_sequences" if protocol == "messages" else "stop"
    assert opened(protocol, {**body, key: ["x" * 1000]}).request.parsing_options.stop_sequences
    if protocol == "chat":  # parity knows no such limit
        ChatCompletionRequest({"model": MODEL, **body}).convert(ConversionOptions())
