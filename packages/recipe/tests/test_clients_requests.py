"""What clients send at their defaults: forced tools, switches of thinking, newer blocks, tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_recipe import (
    ConversionError,
    ConversionOptions,
    Exchange,
    RequestParseError,
    request_grammar,
)

MODEL = "DeepSeek-V4.1-Flash"
USER = {"role": "user", "content": "weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = (
    '<｜DSML｜ invoke name="w">\n<｜DSML｜ parameter name="city" string="true">Oslo'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)
BLOCK = "\n\n<｜DSML｜ calls>\n" + CALL


def forced(protocol: str, choice: str, **more: Any) -> dict[str, Any]:
    """A request that forces a call, by any tool or by name, thinking as it is by default."""
    function = {"name": "w", "parameters": SCHEMA}
    if protocol == "chat":
        named: Any = {"type": "function", "function": {"name": "w"}}
        return {
            "model": MODEL,
            "messages": [USER],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": named if choice == "named" else "required",
            **more,
        }
    if protocol == "responses":
        named = {"type": "function", "name": "w"}
        return {
            "model": MODEL,
            "input": [USER],
            "tools": [{"type": "function", **function}],
            "tool_choice": named if choice == "named" else "required",
            **more,
        }
    named = {"type": "tool", "name": "w"}
    return {
        "model": MODEL,
        "max_tokens": 99,
        "messages": [USER],
        "tools": [{"name": "w", "input_schema": SCHEMA}],
        "tool_choice": named if choice == "named" else {"type": "any"},
        **more,
    }


FORCED = [(p, c) for p in ("chat", "responses", "messages") for c in ("any", "named")]
THINKS = {
    "chat": {"thinking": {"type": "enabled"}},
    "responses": {"reasoning": {"effort": "high"}},
    "messages": {"thinking": {"type": "enabled", "budget_tokens": 2000}},
}


def answer_of(exchange: Exchange[str], text: str) -> str:
    answer = exchange.answer
    answer.ready(prompt_tokens=1)
    answer.text(text)
    answer.finish()
    return exchange.response_json()


@pytest.mark.parametrize(("protocol", "choice"), FORCED)
def test_without_grammars_a_forced_call_ends_thinking_and_is_opened_by_the_prompt(
    protocol: str, choice: str
) -> None:
    exchange = Exchange(protocol, forced(protocol, choice, **THINKS[protocol]), id="r")
    assert not exchange.request.conversation.thinking_mode
    assert exchange.prompt.endswith("</think>\n\n<｜DSML｜ calls>\n")
    body = answer_of(exchange, CALL)
    assert "Oslo" in body
    assert '"w"' in body


@pytest.mark.parametrize(("protocol", "choice"), FORCED)
def test_with_grammars_a_forced_call_follows_free_thinking(protocol: str, choice: str) -> None:
    options = ConversionOptions().with_thinking_before_forced_calls(True)
    exchange = Exchange(
        protocol, forced(protocol, choice, **THINKS[protocol]), id="r", options=options
    )
    assert exchange.request.conversation.thinking_mode
    assert exchange.prompt.endswith("<think>")
    grammar = request_grammar(exchange.request)
    assert grammar is not None
    form = json.loads(grammar.text)["format"]
    kinds = [part["type"] for part in form["elements"]]
    assert kinds[0] == "any_text"  # the thinking
    assert "optional" not in grammar.text.split("calls")[0].rsplit("any_text", 1)[-1]
    body = answer_of(exchange, "Let me see.</think>" + BLOCK)
    assert "Let me see." in body
    assert "Oslo" in body


@pytest.mark.parametrize("tools", [None, []], ids=["absent", "empty"])
@pytest.mark.parametrize(("protocol", "choice"), FORCED)
def test_a_call_cannot_be_forced_without_tools(protocol: str, choice: str, tools: Any) -> None:
    body = forced(protocol, choice, tools=tools)
    if tools is None:
        del body["tools"]
    with pytest.raises(ConversionError, match="declare it in `tools`") as refused:
        Exchange(protocol, body, id="r")
    assert refused.value.param == "tool_choice"
    kind = "auto" if protocol != "messages" else {"type": "auto"}
    Exchange(protocol, {**body, "tool_choice": kind}, id="r")


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_history_of_a_forced_call_drops_its_thinking(protocol: str) -> None:
    body = forced(protocol, "any", **THINKS[protocol])
    if protocol == "chat":
        turn = {"role": "assistant", "content": "a", "reasoning_content": "deep"}
        body["messages"] = [USER, turn, USER]
    elif protocol == "messages":
        blocks = [{"type": "thinking", "thinking": "deep"}, {"type": "text", "text": "a"}]
        body["messages"] = [USER, {"role": "assistant", "content": blocks}, USER]
    else:
        reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "deep"}]}
        body["input"] = [USER, reasoning, {"role": "assistant", "content": "a"}, USER]
    assert "deep" not in Exchange(protocol, body, id="r").prompt


@pytest.mark.parametrize(("protocol", "choice"), FORCED)
def test_parity_refuses_what_the_reference_refuses(protocol: str, choice: str) -> None:
    if protocol == "messages" and choice == "any":
        return  # the reference passes `any` over
    with pytest.raises(ConversionError, match="Thinking mode does not support"):
        Exchange(protocol, forced(protocol, choice), profile="parity")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {}}, True),
        ({"enable_thinking": False}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "low"}}, True),
        ({"reasoning": {"max_tokens": 0}}, False),
        ({"reasoning": {"max_tokens": 100}}, True),
        ({"thinking_budget": 0}, False),
        ({"thinking_budget": 4096}, True),
        ({"enable_thinking": False, "thinking": {"type": "enabled"}}, True),
        ({"enable_thinking": True, "reasoning_effort": "none"}, False),
    ],
)
def test_thinking_switches_of_other_servers(fields: dict[str, Any], thinks: bool) -> None:
    body = {"model": MODEL, "messages": [USER], **fields}
    assert Exchange("chat", body).request.conversation.thinking_mode is thinks
    own = "thinking" in fields or "reasoning_effort" in fields
    parity = Exchange("chat", body, profile="parity").request.conversation.thinking_mode
    assert parity is (thinks if own else True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
        ({"enable_thinking": 0}, "enable_thinking"),
        ({"reasoning": "off"}, "reasoning"),
        ({"reasoning": {"effort": "wild"}}, "reasoning.effort"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
    ],
)
def test_a_switch_that_cannot_be_read_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ConversionError) as caught:
        Exchange("chat", {"model": MODEL, "messages": [USER], **fields})
    assert caught.value.param == param


def test_messages_do_not_think_unless_asked() -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [USER]}
    assert not Exchange("messages", body).request.conversation.thinking_mode
    effort = {**body, "output_config": {"effort": "high"}}
    assert not Exchange("messages", effort).request.conversation.thinking_mode
    for kind in ("enabled", "adaptive"):
        asked = {**body, "thinking": {"type": kind, "budget_tokens": 1024}}
        assert Exchange("messages", asked).request.conversation.thinking_mode
    assert Exchange("messages", body, profile="parity").request.conversation.thinking_mode


def test_redacted_thinking_is_passed_over_and_parity_refuses_it() -> None:
    blocks = [{"type": "redacted_thinking", "data": "abc"}, {"type": "text", "text": "answer"}]
    turns = [USER, {"role": "assistant", "content": blocks}, USER]
    body = {"model": MODEL, "max_tokens": 9, "messages": turns}
    prompt = Exchange("messages", body).prompt
    assert "answer" in prompt
    assert "abc" not in prompt
    with pytest.raises(RequestParseError, match="redacted_thinking"):
        Exchange("messages", body, profile="parity")
    misplaced = {**body, "messages": [{"role": "user", "content": [blocks[0]]}]}
    with pytest.raises(ConversionError, match="only be in `assistant`"):
        Exchange("messages", misplaced)


def test_search_results_of_the_client_are_shown_with_their_source() -> None:
    result = {
        "type": "search_result",
        "source": "https://a.example/x",
        "title": "About",
        "content": [{"type": "text", "text": "Foxes sleep."}],
    }
    body = {
        "model": MODEL,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [result, {"type": "text", "text": "so?"}]}],
    }
    assert "[About](https://a.example/x)\nFoxes sleep." in Exchange("messages", body).prompt


@pytest.mark.parametrize(
    "kind",
    ["file_search", "code_interpreter", "mcp", "image_generation", "local_shell", "unheard_of"],
)
def test_a_responses_tool_that_is_not_here_is_refused_by_name(kind: str) -> None:
    body = {"model": MODEL, "input": "hi", "tools": [{"type": kind}]}
    with pytest.raises(RequestParseError, match=f"no tool of type `{kind}`") as caught:
        Exchange("responses", body)
    assert caught.value.param == "tools[0].type"
    Exchange("responses", body, profile="parity")


def test_additional_tools_are_tools() -> None:
    tool = {"type": "function", "name": "w", "parameters": SCHEMA}
    item = {"type": "additional_tools", "role": "developer", "tools": [tool]}
    body = {"model": MODEL, "input": [item, {"role": "user", "content": "hi"}]}
    exchange = Exchange("responses", body)
    assert [t.name for t in exchange.request.conversation.tools] == ["w"]
    parity = Exchange("responses", body, profile="parity")
    assert not parity.request.conversation.tools


def test_a_custom_tool_in_an_added_namespace_is_called_and_answered() -> None:
    custom = {"type": "custom", "name": "exec", "description": "run"}
    item = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [{"type": "namespace", "name": "functions", "tools": [custom]}],
    }
    turn = {"type": "message", "role": "user", "content": "hi"}
    body = {"model": "DeepSeek-V4.1-Flash", "input": [item, turn]}
    exchange = Exchange("responses", body, id="i")
    [tool] = exchange.request.conversation.tools
    exchange.answer.text(
        f't</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{tool.name}">\n'
        '<｜DSML｜ parameter name="input" string="true">ls</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    exchange.answer.finish()
    call = exchange.response()["output"][-1]
    assert (call["type"], call["name"], call["namespace"], call["input"]) == (
        *("custom_tool_call", "exec", "functions"),
        "ls",
    )
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    body["input"] = [item, turn, call, result]
    assert f'invoke name="{tool.name}"' in Exchange("responses", body, id="j").prompt
