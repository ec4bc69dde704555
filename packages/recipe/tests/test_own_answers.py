"""An answer of ours, sent back as history, is always a valid request that renders."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import Exchange, MemoryResponseStore

MODEL = "DeepSeek-V4.1-Flash"
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}}}
CALL = (
    '<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="cmd" string="true">ls</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
)
BLOCK = f"\n\n<｜DSML｜ calls>\n{CALL}</｜DSML｜ calls>"
ATOMS = st.sampled_from(
    [
        *("a", " b ", "\n", "\n\n", "</think>", "<", "</", "<｜DSML｜", "</｜DSML｜ calls>", "é😀"),
        *("\n\n<｜DSML｜ calls>\n", CALL, BLOCK, BLOCK, '<｜DSML｜ invoke name="g">'),
        *("<｜DSML｜ parameter string=\"false\" name='n'>", "</｜DSML｜ parameter>", "1"),
        *("</｜DSML｜ invoke>", "<｜DSML｜bogus>", '{"cmd": "x"}'),
    ]
)
OUTPUTS = st.lists(ATOMS, max_size=10).map("".join)


def tools(protocol: str) -> list[Any]:
    if protocol == "messages":
        return [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")]
    functions = [{"name": name, "parameters": SCHEMA} for name in ("f", "g")]
    if protocol == "responses":
        return [{"type": "function", **function} for function in functions]
    return [{"type": "function", "function": function} for function in functions]


def body(protocol: str, turns: list[Any], **more: Any) -> dict[str, Any]:
    name = "input" if protocol == "responses" else "messages"
    if protocol == "messages":
        more = {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 9}, **more}
    return {"model": MODEL, name: turns, "tools": tools(protocol), **more}


def follow_up(protocol: str, response: dict[str, Any]) -> list[Any]:
    """The answer as its client keeps it, with a result for each of its calls."""
    if protocol == "chat":
        message = response["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        return [
            message,
            *({"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls),
        ]
    if protocol == "responses":
        items = response["output"]
        return [*items, *outputs(items)]
    blocks = response["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return [
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]


def outputs(items: list[Any]) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}
        for item in items
        if item["type"] == "function_call"
    ]


def answered(protocol: Any, profile: Any, output: str, reason: Any, **more: Any) -> Exchange[str]:
    turns = [{"role": "user", "content": "x"}]
    exchange = Exchange(protocol, body(protocol, turns), id="resp_1", profile=profile, **more)
    exchange.answer.text(output)
    exchange.answer.finish(reason)
    return exchange


@pytest.mark.parametrize("profile", ["parity", "extended"])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
@settings(max_examples=60, deadline=None)
@example(output=f"t</think>a{BLOCK}\n\nDone calling.", reason="stop")
@example(output=f"t</think>{BLOCK}between{BLOCK}", reason="stop")
@example(output="t</think>", reason="stop")
@example(output=f"t{BLOCK}", reason="stop")
@given(output=OUTPUTS, reason=st.sampled_from(["stop", "length", "content_filter"]))
def test_an_answer_renders_as_history(
    protocol: Any, profile: Any, output: str, reason: Any
) -> None:
    response = answered(protocol, profile, output, reason).response()
    sent = json.loads(json.dumps(response))
    turns = [{"role": "user", "content": "x"}, *follow_up(protocol, sent)]
    if protocol != "messages":
        turns.append({"role": "user", "content": "go on"})
    assert Exchange(protocol, body(protocol, turns), id="y", profile=profile).prompt


@settings(max_examples=60, deadline=None)
@example(output=f"t</think>a{BLOCK}\n\nDone calling.", reason="stop")
@given(output=OUTPUTS, reason=st.sampled_from(["stop", "length"]))
def test_an_answer_is_gone_on_from_through_the_store(output: str, reason: Any) -> None:
    store = MemoryResponseStore()
    first = answered("responses", "extended", output, reason, store=store, owner="o")
    assert first.stored
    following = [*outputs(first.response()["output"]), {"role": "user", "content": "go on"}]
    more = {"previous_response_id": "resp_1"}
    second = Exchange(
        "responses", body("responses", following, **more), id="y", store=store, owner="o"
    )
    assert second.prompt.count("go on") == 1


def test_what_stands_behind_calls_is_in_the_next_prompt() -> None:
    output = f"t</think>a{BLOCK}\n\nDone calling."
    for protocol in ("chat", "responses", "messages"):
        response = answered(protocol, "extended", output, "stop").response()
        turns = [{"role": "user", "content": "x"}, *follow_up(protocol, response)]
        prompt = Exchange(protocol, body(protocol, turns), id="y").prompt
        assert "a\n\nDone calling.\n\n<｜DSML｜ calls>" in prompt
