"""Whatever a client sends in the fields of the extended profile, only our errors come out."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    ConversionOptions,
    DocumentLimits,
    Exchange,
    MemoryResponseStore,
    ReasoningSealer,
    RecipeError,
    ServerToolPolicy,
    WebSearchBehavior,
    error_response,
)

MODEL = "DeepSeek-V4.1-Flash"
SEALER = ReasoningSealer({"k": bytes(32)})
OPTIONS = (
    ConversionOptions(
        responses_web_search=WebSearchBehavior.Run, messages_web_search=WebSearchBehavior.Run
    )
    .with_reasoning_sealer(SEALER)
    .with_document_limits(DocumentLimits(max_bytes=2000, max_total_chars=1000))
    .with_tool_call_logprobs(True)
)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-1, 2**64),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["type", "id", "data", "syntax"]), st.integers(), max_size=2),
)


def near(*good: Any) -> st.SearchStrategy[Any]:
    """Mostly the first value, sometimes another that fits, seldom anything."""
    return st.integers(0, 19).flatmap(
        lambda n: ODD if n == 19 else st.just(good[0]) if n < 14 else st.sampled_from(good)
    )


def body(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A request body; one in ten names no model of ours."""
    named = st.sampled_from([MODEL] * 9 + ["other"])
    needed = {k: fields.pop(k) for k in ("messages", "max_tokens") if k in fields}
    return st.fixed_dictionaries({"model": named, **needed}, optional=fields)


def record(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object that seldom lacks one of its fields."""
    lacking = st.sampled_from([None] * 12 + list(fields))
    whole = st.fixed_dictionaries(fields)
    return st.builds(
        lambda value, name: {k: v for k, v in value.items() if k != name}, whole, lacking
    )


DATA = near("data:text/plain;base64,aGk=", "data:text/plain,hi", "aGk=", "data:;base64,!", "data:")
FILE = record(file_data=DATA, filename=near("a.txt", "a.md", "x.exe"), file_id=near(None, "f"))
CHAT_PART = st.one_of(
    st.builds(lambda f: {"type": "file", "file": f}, st.one_of(FILE, ODD)),
    st.builds(lambda f: {"type": "file", **f}, FILE),
    record(type=near("text", "input_audio", "video_url", "refusal"), text=near("hi")),
)
GRAMMAR = record(
    type=near("grammar", "text"), syntax=near("lark", "regex"), definition=near('start: "a"')
)
CHAT = body(
    messages=st.lists(
        record(
            role=near("user", "developer", "assistant"),
            content=st.one_of(near("hi"), st.lists(CHAT_PART, max_size=2)),
        ),
        min_size=1,
        max_size=3,
    ),
    n=near(1, 2, 17),
    max_completion_tokens=near(5, 0),
    logprobs=near(True),
    tools=near([{"type": "function", "function": {"name": "f"}}]),
    tool_choice=near(
        "auto",
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "function", "function": {"name": "g"}}],
            },
        },
    ),
)
SEALED = near(SEALER.seal("hm"), "dr1.k.AAAA", "dr1..", "dr1.k.é", "resp-0", "")
ITEM = st.one_of(
    record(
        type=near("reasoning"),
        encrypted_content=SEALED,
        content=near([], [{"type": "reasoning_text", "text": "a"}]),
    ),
    record(
        role=near("user", "assistant"),
        content=st.one_of(
            near("hi"), st.lists(st.builds(lambda f: {"type": "input_file", **f}, FILE), max_size=2)
        ),
    ),
    record(type=near("custom_tool_call"), call_id=near("c"), name=near("shell"), input=near("ls")),
    record(type=near("custom_tool_call_output"), call_id=near("c"), output=near("x", None)),
    record(type=near("web_search_call"), id=near("w")),
)
RESPONSES = body(
    input=st.one_of(near("hi"), st.lists(ITEM, max_size=4)),
    store=near(True, False),
    previous_response_id=near(None, "r1", "r2"),
    include=near(["reasoning.encrypted_content"], "all"),
    metadata=near({"a": "b"}),
    max_tool_calls=near(1, 3),
    tools=st.lists(
        st.one_of(
            record(type=near("custom"), name=near("shell", "a b"), format=st.one_of(GRAMMAR, ODD)),
            near({"type": "web_search"}),
        ),
        max_size=3,
    ),
    tool_choice=near(
        "auto",
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "shell"}]},
    ),
    reasoning=near({"effort": "none"}, {"effort": "high"}),
)
BLOCK = st.one_of(
    record(
        type=near("document"),
        title=near("t"),
        source=st.one_of(
            record(
                type=near("text", "base64", "url", "content"),
                media_type=near("text/plain"),
                data=near("hi", "aGk="),
            ),
            ODD,
        ),
    ),
    record(
        type=near("server_tool_use"),
        id=near("w"),
        name=near("web_search"),
        input=near({"query": "x"}),
    ),
    record(
        type=near("web_search_tool_result"),
        tool_use_id=near("w"),
        content=near(
            [], [{"type": "web_search_result", "url": "u", "title": "t"}], {"error_code": "x"}, [3]
        ),
    ),
    record(type=near("text"), text=near("hi")),
)
MESSAGES = body(
    max_tokens=near(9),
    messages=st.lists(
        record(
            role=near("user", "assistant"),
            content=st.one_of(near("hi"), st.lists(BLOCK, max_size=4)),
        ),
        min_size=1,
        max_size=3,
    ),
    tools=st.lists(
        record(
            type=near("web_search_20250305", "custom"),
            name=near("web_search"),
            max_uses=near(1, 2),
            input_schema=near({"type": "object"}),
        ),
        max_size=2,
    ),
    tool_choice=near({"type": "any"}, {"type": "tool", "name": "web_search"}),
    output_config=near({"format": {"type": "json_schema", "schema": {}}}, {"format": 3}),
    thinking=near({"type": "disabled"}, {"type": "enabled"}),
)
SEARCH = (
    '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="web_search">\n'
    '<｜DSML｜ parameter name="query" string="true">x</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


async def broken(name: str, input: dict[str, Any], policy: ServerToolPolicy) -> Any:
    raise OSError("no network")


def go(protocol: Any, body: dict[str, Any], said: str) -> None:
    store = MemoryResponseStore()
    first = Exchange("responses", {"model": MODEL, "input": "x"}, id="r1", store=store)
    first.answer.finish()
    try:
        exchange = Exchange(protocol, body, id="r9", options=OPTIONS, store=store)
    except RecipeError as error:
        event("refused")
        refusal = error_response(protocol, error)
    else:
        event("answered")
        answered(exchange, said, store)
        return
    status, payload = refusal
    assert status in (400, 404), payload
    assert payload["error"]["message"]
    json.dumps(payload)


def answered(exchange: Exchange, said: str, store: MemoryResponseStore) -> None:
    frames: list[str] = []
    for answer in exchange.answers:
        frames += answer.ready(prompt_tokens=3)
        frames += answer.text(said)
        frames += answer.finish()
        for _ in range(9):
            if not answer.pending_calls:
                break
            frames += asyncio.run(answer.run_server_tools(broken))
            frames += answer.text(said)
            frames += answer.finish()
        assert answer.finished
    "".join(frames).encode()
    json.dumps(exchange.response())
    assert exchange.stored == (store.get("", "r9") is not None)


SAID = st.sampled_from(["ok", "hm</think>ok", SEARCH, SEARCH[:-30], ""])
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(CHAT, SAID)
def test_chat(body: dict[str, Any], said: str) -> None:
    go("chat", body, said)


@FUZZ
@given(RESPONSES, SAID)
def test_responses(body: dict[str, Any], said: str) -> None:
    go("responses", body, said)


@FUZZ
@given(MESSAGES, SAID)
def test_messages(body: dict[str, Any], said: str) -> None:
    go("messages", body, said)
