"""A list of tools that was sent before changes nothing but the time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV41Encoding,
    MessagesRequest,
    RequestParseError,
    native,
)
from deepinfer_recipe.protocols.chat.body import ChatBody
from deepinfer_recipe.protocols.common import tool_lists
from deepinfer_recipe.protocols.common.body import Body
from deepinfer_recipe.protocols.messages.body import MessagesBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "description": "x" * 300}}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": f"f{n}", "description": 'é]}"', "parameters": SCHEMA}}
    for n in range(2)
]
MESSAGES_TOOLS = [{"name": f"f{n}", "input_schema": SCHEMA} for n in range(2)]
REQUESTS: list[tuple[Any, Any, Any]] = [
    (ChatCompletionRequest, ChatBody, CHAT_TOOLS),
    (MessagesRequest, MessagesBody, MESSAGES_TOOLS),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_lists, "_known", tool_lists.KnownLists())


def body_with(tools: Any, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": 'hi "tools": [1] \\'}]
    body = {"model": "DeepSeek-V4.1-Flash", "tools": tools, "max_tokens": 9, "messages": messages}
    return {**body, **changes}


def prompt(request_type: Any, body: Any) -> Any:
    request = request_type(body).convert(ConversionOptions())
    rendered = DeepseekV41Encoding().render_conversation(request.conversation)
    return rendered.prompt, rendered.special_ranges, request.inference_options


@pytest.mark.parametrize(("request_type", "model", "tools"), REQUESTS)
def test_the_second_request_shares_the_tools_of_the_first(
    request_type: Any, model: Any, tools: Any
) -> None:
    for send in (lambda body: json.dumps(body).encode(), lambda body: body):
        first, _ = tool_lists.parse_request(model, send(body_with(tools)))
        second, _ = tool_lists.parse_request(model, send(body_with(tools, max_tokens=10)))
        other, _ = tool_lists.parse_request(model, send(body_with(tools[:1])))
        assert all(a is b for a, b in zip(first.tools, second.tools, strict=True))
        assert other.tools[0] is not first.tools[0]
        assert second.max_tokens == 10
        results = [prompt(request_type, send(body_with(tools))) for _ in range(3)]
        assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(("request_type", "model", "tools"), REQUESTS)
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-1],
        lambda text: text + "x",
        lambda text: text.replace('"max_tokens": 9', '"max_tokens": -1'),
        lambda text: text.replace('"role": "user"', '"role": "u\\q"'),
        lambda text: text.replace('"max_tokens": 9', '"max_tokens": 09'),
        lambda text: text.replace('"messages"', '"massages"'),
        lambda text: "[" + text + "]",
    ],
)
def test_errors_are_those_of_the_body_as_it_was_sent(
    request_type: Any, model: Any, tools: Any, damage: Any
) -> None:
    good = json.dumps(body_with(tools))
    bad = damage(good).encode()
    assert bad != good.encode()
    errors: list[tuple[str, str | None]] = []
    for _ in range(2):
        with pytest.raises(RequestParseError) as caught:
            request_type(bad)
        errors.append((str(caught.value), caught.value.param))
        request_type(good.encode())
    assert errors[0] == errors[1]


@pytest.mark.parametrize(("request_type", "model", "tools"), REQUESTS)
def test_of_several_lists_of_tools_the_last_counts(
    request_type: Any, model: Any, tools: Any
) -> None:
    one, two = json.dumps(tools[:1]), json.dumps(tools)
    request_type(json.dumps(body_with(tools)).encode())
    request_type(json.dumps(body_with(tools[:1])).encode())
    start = json.dumps(body_with([]))[:-1].replace('"tools": [], ', "")
    for text, count in (
        (f'{start}, "tools": {one}, "tools": {two}}}', 2),
        (f'{start}, "tools": {two}, "tools": {one}}}', 1),
        (f'{start}, "tools": {two}, "t\\u006fols": {one}}}', 1),
        (f'{start}, "tools": {two}, "tools": null}}', None),
        (f'{start}, "x": {{"tools": {two}}}, "tools": {one}}}', 1),
        (f'{start}, "x": {{"tools": {two}}}}}', None),
    ):
        for _ in range(2):
            found = tool_lists.parse_request(model, text.encode())[0].tools
            assert (None if found is None else len(found)) == count


def test_tools_that_are_refused_are_refused_again() -> None:
    tools = [*CHAT_TOOLS, CHAT_TOOLS[0]]
    bad_name = [{"type": "function", "function": {"name": "a b", "parameters": SCHEMA}}]
    bad_schema = [
        {"type": "function", "function": {"name": "f", "parameters": {**SCHEMA, "type": "thing"}}}
    ]
    for declared in (tools, bad_name, bad_schema):
        messages: list[str] = []
        for _ in range(3):
            request = ChatCompletionRequest(json.dumps(body_with(declared)).encode())
            with pytest.raises(ConversionError) as caught:
                request.convert(ConversionOptions())
            messages.append(caught.value.message)
        assert len(set(messages)) == 1


def test_profiles_do_not_share_what_they_read_differently() -> None:
    strict = {"type": "object", "$defs": {"d": {"type": "string"}}, "properties": {}}
    function = {"name": "f", "description": "x" * 600, "parameters": strict, "strict": True}
    body = json.dumps(body_with([{"type": "function", "function": function}])).encode()
    parity, extended, again = (
        ChatCompletionRequest(body, profile=profile)
        .convert(ConversionOptions())
        .conversation.tools[0]
        .parameters
        for profile in ("parity", "extended", "parity")
    )
    assert "$defs" in extended
    assert "$defs" not in parity
    assert again == parity


def test_what_is_remembered_is_bounded_and_the_oldest_use_goes_first() -> None:
    known = tool_lists.KnownLists(max_bytes=3000)
    keys = [(Body, "json", bytes([65 + n]) * 1000) for n in range(4)]
    for key in keys[:3]:
        known.remember(key, [])
    assert known.recall(keys[0]) == []
    known.remember(keys[3], [])
    assert [known.recall(key) is not None for key in keys] == [True, False, True, True]
    known.remember((Body, "json", b"x" * (tool_lists.MAX_LIST_BYTES + 1)), [])
    known.remember((Body, "json", b"short"), [])
    assert known._bytes == 3000


def test_threads_may_share_the_memory() -> None:
    known = tool_lists.KnownLists(max_bytes=5000)

    def use(number: int) -> None:
        for step in range(300):
            key = (Body, "json", bytes([65 + (number + step) % 20]) * 1000)
            if known.recall(key) is None:
                known.remember(key, [])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(8)))
    assert known._bytes == sum(len(raw) for _, _, raw in known._lists) <= 5000


@pytest.mark.skipif(native.routines is None, reason=f"this is {native.STATE}")
@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["tools", "a", "to", "é", 'q"', "b\\"]),
        st.one_of(
            st.text('"\\[]{},:é', max_size=8),
            st.integers(),
            st.lists(st.text('"\\[]{}', max_size=4), max_size=3),
            st.dictionaries(st.just("tools"), st.lists(st.integers(), max_size=2)),
        ),
    ),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_the_list_is_found_where_it_lies(
    value: dict[str, Any], indent: int | None, ascii_only: bool
) -> None:
    raw = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    found = native.routines.find_list(raw, "tools")  # type: ignore[union-attr]
    if found is not None:
        assert json.loads(raw[found[0] : found[1]]) == value["tools"]
    elif not any("\\" in json.dumps(key, ensure_ascii=ascii_only) for key in value):
        assert not isinstance(value.get("tools"), list)


@pytest.mark.skipif(native.routines is None, reason=f"this is {native.STATE}")
@given(st.binary(max_size=40), st.lists(st.sampled_from([*b'{}[]":,\\ t']), max_size=30))
def test_looking_for_the_list_never_leaves_the_body(raw: bytes, pieces: list[int]) -> None:
    for body in (raw, bytes(pieces), b'{"tools":' + raw, b'{"tools":[' + bytes(pieces)):
        found = native.routines.find_list(body, "tools")  # type: ignore[union-attr]
        assert found is None or 0 <= found[0] < found[1] <= len(body)
