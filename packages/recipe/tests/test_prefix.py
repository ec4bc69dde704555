"""In a tool loop the next prompt continues the last turn, in every protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import Exchange, first_divergence

MODEL = "DeepSeek-V4.1-Flash"
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
USER = {"role": "user", "content": "Weather?"}
EOS = "<｜end▁of▁sentence｜>"


def output(thinking: str, content: str, arguments: dict[str, Any]) -> str:
    """What the model writes for one call, in its own format."""
    lines: list[str] = []
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else json.dumps(value, ensure_ascii=False)
        flag = "true" if is_string else "false"
        head = f'<｜DSML｜ parameter name="{key}" string="{flag}">'
        lines.append(f"{head}{text}</｜DSML｜ parameter>")
    body = "\n".join(lines)
    return (
        f"{thinking}</think>{content}\n\n<｜DSML｜ calls>\n"
        f'<｜DSML｜ invoke name="get">\n{body}\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}'
    )


def first_body(protocol: str) -> dict[str, Any]:
    function = {"name": "get", "parameters": SCHEMA}
    if protocol == "chat":
        tools = [{"type": "function", "function": function}]
        return {"model": MODEL, "messages": [USER], "tools": tools}
    if protocol == "responses":
        return {"model": MODEL, "input": [USER], "tools": [{"type": "function", **function}]}
    tools = [{"name": "get", "input_schema": SCHEMA}]
    thinking = {"type": "enabled"}
    return {"model": MODEL, "messages": [USER], "tools": tools, "thinking": thinking}


def next_body(protocol: str, body: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """What a client sends next: the answer as it came, and the result of its call."""
    if protocol == "chat":
        message = response["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        result = {"role": "tool", "tool_call_id": call_id, "content": "Rain."}
        return {**body, "messages": [*body["messages"], message, result]}
    if protocol == "responses":
        call_id = response["output"][-1]["call_id"]
        result = {"type": "function_call_output", "call_id": call_id, "output": "Rain."}
        return {**body, "input": [*body["input"], *response["output"], result]}
    answer = {"role": "assistant", "content": response["content"]}
    call_id = response["content"][-1]["id"]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "Rain."}
    return {
        **body,
        "messages": [*body["messages"], answer, {"role": "user", "content": [result]}],
    }


def turn(protocol: Any, body: dict[str, Any], text: str) -> tuple[Exchange, dict[str, Any]]:
    exchange = Exchange(protocol, body, id="id", created=0)
    exchange.answer.text(text.removesuffix(EOS))
    exchange.answer.finish()
    return exchange, exchange.response()


WORDS = st.text(st.sampled_from("ab é.\n"), min_size=1, max_size=12).map(str.strip).filter(bool)
VALUES = st.integers(-5, 5) | st.booleans() | WORDS | st.lists(st.integers(0, 3), max_size=2)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["chat", "responses", "messages"]),
    st.lists(
        st.tuples(WORDS, WORDS, st.dictionaries(WORDS, VALUES, min_size=1, max_size=2)),
        min_size=1,
        max_size=3,
    ),
)
def test_prompt_of_the_next_turn_continues_the_last(
    protocol: str, turns: list[tuple[str, str, dict[str, Any]]]
) -> None:
    body = first_body(protocol)
    for thinking, content, arguments in turns:
        text = output(thinking, content, arguments)
        exchange, response = turn(protocol, body, text)
        body = next_body(protocol, body, response)
        later = Exchange(protocol, body, id="id", created=0)
        assert first_divergence(exchange.rendered, text, later.rendered) is None


def chat_divergence(text: str, changes: dict[str, Any] | None = None, tools: bool = True) -> Any:
    body = first_body("chat")
    if not tools:
        del body["tools"]
    exchange, response = turn("chat", body, text)
    message = response["choices"][0]["message"]
    following = [{"role": "user", "content": "And?"}]
    if message.get("tool_calls"):
        body = next_body("chat", body, response)
    else:
        body = {**body, "messages": [*body["messages"], message, *following]}
    body = {**body, **(changes or {})}
    later = Exchange("chat", body, id="id", created=0)
    return first_divergence(exchange.rendered, text, later.rendered)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda: chat_divergence("hm</think>Rain.", tools=False), "without tools the thinking"),
        (lambda: chat_divergence("hm\n\n</think>\n\nRain."), "newlines around thinking"),
        (lambda: chat_divergence(output("a", "b", {"n": 1}).replace(">1<", ">1.50<")), "anew"),
        (lambda: chat_divergence("a</think>b", {"reasoning_effort": "max"}), "something before"),
    ],
)
def test_cause_of_a_divergence_is_told(found: Any, reason: str) -> None:
    divergence = found()
    assert divergence is not None
    assert reason in divergence.reason
    assert divergence.cached != divergence.sent
