"""Calls written as JSON: handed on while they come, the same in every cut, always an object."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_support import BEGIN, END, SOURCES, TOKENS

from deepinfer_recipe import ConversionOptions, Exchange, TemplateModel
from deepinfer_recipe.parsing.call_stream import MAX_HEAD, CallStream
from deepinfer_recipe.parsing.json_pieces import JsonPieces
from deepinfer_recipe.parsing.output_parser import OutputParser

DIALECTS = {
    "hermes": ('<tool_call>\n{"name": "get", "arguments": ', "}\n</tool_call>"),
    "mistral": ('[TOOL_CALLS][{"name": "get", "arguments": ', "}]"),
    "mistral, by name": ("[TOOL_CALLS]get[ARGS]", ""),
    "llama3": ('{"name": "get", "parameters": ', "}"),
    "llama3, typed": ('{"type": "function", "name": "get", "parameters": ', "}"),
    "llama3, wrapped": ('{"type": "function", "function": {"name": "get", "arguments": ', "}}"),
    "llama3, behind the tag": ('<|python_tag|>{"name": "get", "parameters": ', "}"),
}
TEXTS = st.text(st.sampled_from('ab"\\\n\t/{}[],:<>é日😀\x01 ') | st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=4)
CUTS = st.lists(st.integers(0, 10**6), max_size=9)
DAMAGED = st.lists(
    st.sampled_from(
        [
            *(
                '{"a": ',
                '"b": ',
                '"',
                "{",
                "}",
                "[",
                "]",
                ",",
                ":",
                "1",
                "-",
                "1e999",
                "tru",
                "true",
            ),
            *(
                "\\",
                "\\u",
                "\\ud83d",
                "\\ude00",
                "\\n",
                "\\q",
                "\n",
                " ",
                "é",
                "x",
                '"a"',
                "9" * 400,
            ),
        ]
    ),
    max_size=14,
).map("".join)


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@cache
def options(dialect: str) -> ConversionOptions:
    model = TemplateModel(
        SOURCES[dialect],
        special_tokens=TOKENS[dialect],
        bos_token=BEGIN.get(dialect, ""),
        eos_token=END.get(dialect, ""),
    )
    return ConversionOptions().with_model_versions_by_name({"m": model})


def opened(kind: str) -> Exchange[str]:
    function = {"name": "get", "parameters": {"type": "object"}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
        "stream": True,
    }
    return Exchange(
        "chat",
        body,
        id="i",
        created=1,
        options=options(kind.partition(",")[0]),
        call_ids=lambda n: f"call_{n}",
    )


def message(kind: str, pieces: Iterable[str]) -> Any:
    exchange = opened(kind)
    for piece in pieces:
        exchange.answer.text(piece)
    exchange.answer.finish()
    return exchange.response()["choices"][0]["message"], exchange.answer.tool_call_repairs


def deltas(frames: Iterable[str]) -> str:
    """The arguments that these events bring."""
    out = ""
    for frame in frames:
        data = frame.removeprefix("data: ").strip()
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                for call in choice["delta"].get("tool_calls") or ():
                    out += call["function"].get("arguments", "")
    return out


@pytest.mark.parametrize("kind", DIALECTS)
def test_arguments_arrive_as_they_are_written(kind: str) -> None:
    before, behind = DIALECTS[kind]
    answer = opened(kind).answer
    assert deltas(answer.text(before)) == ""
    assert deltas(answer.text('{"code": "')) == '{"code": "'
    for number in range(5):
        assert deltas(answer.text(f"line {number}\\n")) == f"line {number}\\n"
    assert deltas(answer.text('", "n":12')) == '", "n": '
    assert deltas(answer.text("3, ")) == "123"
    assert deltas(answer.text('"list": [1 , 2]}')) == ', "list": [1, 2]}'
    assert deltas(answer.text(behind) + answer.finish()) == ""


@pytest.mark.parametrize("kind", DIALECTS)
@settings(max_examples=25, deadline=None)
@given(arguments=OBJECTS, places=CUTS, ascii=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_streamed_arguments_are_those_of_the_whole_call(
    kind: str, arguments: dict[str, Any], places: list[int], ascii: bool, indent: int | None
) -> None:
    before, behind = DIALECTS[kind]
    written = json.dumps(arguments, ensure_ascii=ascii, indent=indent)
    made, repairs = message(kind, cut(before + written + behind, places))
    [call] = made["tool_calls"]
    assert call["function"]["name"] == "get"
    assert call["function"]["arguments"] == json.dumps(arguments, ensure_ascii=False)
    assert repairs == []
    assert not made.get("content")


@pytest.mark.parametrize("kind", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(text=DAMAGED, ends=st.booleans(), places=CUTS)
def test_damaged_arguments_are_an_object_and_the_same_in_every_cut(
    kind: str, text: str, ends: bool, places: list[int]
) -> None:
    before, behind = DIALECTS[kind]
    text = before + "{" + text + (behind if ends else "")
    whole = message(kind, [text])
    assert message(kind, text) == whole
    assert message(kind, cut(text, places)) == whole
    for call in whole[0].get("tool_calls", ()):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


def pieces_of(text: Iterable[str]) -> tuple[str, str, list[str]]:
    """What is written, what is left over, the repairs."""
    out: list[str] = []
    repairs: list[str] = []
    reader = JsonPieces(lambda piece, raw: out.append(piece), repairs, str)
    left: str | None = None
    for piece in text:
        left = reader.feed(piece) if left is None else left + piece
    lost = reader.close() if left is None or reader.is_broken else ""
    assert reader.meant is None or json.loads(reader.meant) == json.loads("".join(out))
    return "".join(out), lost + (left or ""), repairs


@settings(max_examples=200, deadline=None)
@given(value=OBJECTS, ascii=st.booleans(), indent=st.sampled_from([None, 1]), places=CUTS)
def test_an_object_is_written_as_the_library_would(
    value: dict[str, Any], ascii: bool, indent: int | None, places: list[int]
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    expected = (json.dumps(value, ensure_ascii=False), " rest", [])
    assert pieces_of(cut(text + " rest", places)) == expected


@settings(max_examples=300, deadline=None)
@given(text=DAMAGED.map("{".__add__), places=CUTS)
def test_any_text_makes_an_object_and_no_cut_changes_it(text: str, places: list[int]) -> None:
    whole = pieces_of([text])
    assert isinstance(json.loads(whole[0]), dict)
    assert pieces_of(text) == whole
    assert pieces_of(cut(text, places)) == whole


@pytest.mark.parametrize(
    ("written", "arguments", "content"),
    [
        ('{"a": 1, "a": 2}', {"a": 2}, ""),
        ('{"a": 1,}', {"a": 1}, ""),
        ('{"a": "one\ntwo"}', {"a": "one\ntwo"}, ""),
        (r'{"a": "\d+"}', {"a": r"\d+"}, ""),
        ('{"a": 1e999}', {"a": 1.7976931348623157e308}, ""),
        ('{"a": 1, nope}', {"a": 1}, "nope}}"),
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}, ""),
    ],
)
def test_what_is_mended_while_it_comes(
    written: str, arguments: dict[str, Any], content: str
) -> None:
    before, behind = DIALECTS["hermes"]
    made, repairs = message("hermes", before + written + behind)
    [call] = made["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == arguments
    assert (made.get("content") or "").strip() == content
    assert bool(repairs) == (written != '{"a": 1, "a": 2}')


def test_calls_of_several_forms_in_one_list() -> None:
    calls = [
        '{"name": "get", "arguments": {"n": 1}}',
        '{"arguments": {"n": 2}, "name": "get"}',
        '{"name": "get", "arguments": "{\\"n\\": 3}"}',
    ]
    made, repairs = message("mistral", f"[TOOL_CALLS][{', '.join(calls)}]")
    found = [json.loads(call["function"]["arguments"]) for call in made["tool_calls"]]
    assert (found, repairs) == ([{"n": 1}, {"n": 2}, {"n": 3}], [])


def test_arguments_behind_a_long_beginning_wait_for_the_end() -> None:
    before, behind = DIALECTS["hermes"]
    long = before.replace("get", "g" * MAX_HEAD)
    for pieces in ([long + '{"n": 1}' + behind], long + '{"n": 1}' + behind):
        made, _ = message("hermes", pieces)
        [call] = made["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"n": 1}


@pytest.mark.parametrize(
    ("head", "chunk"),
    [
        ('{"name": "get", "arguments": {"a": "', "word "),
        ('{"name": "get", "arguments": {"a": "', "\\n"),
        ('{"name": "get", "arguments": {"a": "', "\\"),
        ('{"name": "get", "arguments": {"a": [', "1, "),
        ('{"name": "get", "arguments": {"a": [', "9"),
        ('{"name": "get", "arguments": {', "\n"),
        ('{"name": "', "x"),
        ("", "\n"),
        ('{"name": "get", "arguments": {}', "\n"),
        ('{"arguments": {"a": "', "word "),
    ],
)
@pytest.mark.parametrize("kind", ["hermes", "mistral", "llama3"])
def test_work_grows_with_the_call(
    kind: str, head: str, chunk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = [0]

    def counting(owner: type, name: str, held: str) -> None:
        real = getattr(owner, name)

        def counted(self: Any, text: str) -> Any:
            total[0] += len(text) + len(getattr(self, held, ""))
            return real(self, text)

        monkeypatch.setattr(owner, name, counted)

    counting(JsonPieces, "feed", "_held")
    counting(CallStream, "_opening", "_held")
    counting(OutputParser, "_block", "")
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": ""}[kind]
    work: list[int] = []
    for count in (500, 5000):
        answer = opened(kind).answer
        total[0] = 0
        answer.text(before + head)
        for _ in range(count):
            answer.text(chunk)
        answer.finish()
        work.append(total[0])
    assert work[1] <= 15 * work[0] + 2 * MAX_HEAD**2
