"""The output parser: what it finds does not depend on how the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.conversation.special_tokens import SpecialTokens
from deepinfer_recipe.parsing.output_parser import OutputParser

CALL = (
    "\n\n<｜DSML｜ calls>\n"
    '<｜DSML｜ invoke name="get_forecast">\n'
    '<｜DSML｜ parameter name="town" string="true">Os"lo\n</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="days" string="false">[3, {"a": null}]</｜DSML｜ parameter>\n'
    "</｜DSML｜ invoke>\n"
    '<｜DSML｜ invoke name="list_trains">\n\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)
V4_CALL = CALL.replace("｜ calls", "｜tool_calls").replace("｜ ", "｜")
PIECES = """
a|b|x |STOP|ST|é😀|"|\\|1|{|<|</|</think>|<｜DSML｜|｜DSML｜|</｜DSML｜ calls>
<｜DSML｜ calls>
<｜DSML｜ invoke name="f">|</｜DSML｜ invoke>|</｜DSML｜ parameter>
<｜DSML｜ parameter name="k" string="true">|<｜DSML｜ parameter name="n" string="false">
"""
SHORT = [piece for line in PIECES.strip().splitlines() for piece in line.split("|")]
ATOMS = st.sampled_from([*SHORT, "\n", "\n\n", CALL, V4_CALL])
TEXTS = st.lists(ATOMS, max_size=12).map("".join)
STAGES = st.sampled_from([None, *ThinkingInitialStage])
STOPS = st.sampled_from([(), ("STOP",), ("ab", "b"), ("\n\n",), ("<",), ("STOP", "x ")])


class Collected:
    """A sink that keeps reasoning, content and calls."""

    def __init__(self) -> None:
        self.parts: list[list[Any]] = []

    def _add(self, kind: str, text: str) -> None:
        assert text, "an empty piece"
        if self.parts and self.parts[-1][0] == kind:
            self.parts[-1][1] += text
        else:
            self.parts.append([kind, text])

    def reasoning(self, text: str) -> None:
        self._add("reasoning", text)

    def content(self, text: str) -> None:
        self._add("content", text)

    def call_started(self, name: str) -> None:
        self.parts.append(["call", name])

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        self._add("arguments", piece)

    def call_ended(self, meant: str | None = None) -> None:
        self.parts.append(["end", ""])

    def text(self, kind: str) -> str:
        return "".join(text for k, text in self.parts if k == kind)

    def arguments(self) -> list[str]:
        return [text for kind, text in self.parts if kind == "arguments"]


def parse(pieces: list[str], *, mends: bool = True, **options: Any) -> Collected:
    sink = Collected()
    parser = OutputParser(ParsingOptions(**options), sink)
    for piece in pieces:
        if parser.is_done:
            break
        parser.feed(piece)
    parser.finish(mends=mends)
    return sink


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(
    TEXTS, st.lists(st.integers(0, 10**6), max_size=30), STAGES, STOPS, st.booleans(), st.booleans()
)
def test_result_does_not_depend_on_the_cut(
    text: str,
    places: list[int],
    stage: ThinkingInitialStage | None,
    stops: tuple[str, ...],
    tools: bool,
    recovers: bool,
) -> None:
    options = {
        "thinking_initial_stage": stage,
        "stop_sequences": stops,
        "parse_tool_calls": tools,
        "recover_tool_calls": recovers,
    }
    whole = parse([text], **options)
    assert parse(cut(text, places), **options).parts == whole.parts
    assert parse(list(text), **options).parts == whole.parts


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(0, 10**6))
def test_recovered_arguments_are_always_a_json_object(text: str, end: int) -> None:
    text = text[: end % (len(text) + 1)]
    found = parse([text], recover_tool_calls=True, stop_sequences=())
    for arguments in found.arguments():
        assert isinstance(json.loads(arguments), dict), arguments


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(CALL)), st.booleans())
def test_call_cut_anywhere_is_closed_into_a_json_object(end: int, recovers: bool) -> None:
    found = parse([CALL[:end]], recover_tool_calls=recovers, mends=True)
    for arguments in found.arguments():
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("text", [CALL, V4_CALL])
def test_both_spellings_of_calls_are_understood(text: str) -> None:
    found = parse(["Checking.", text])
    assert found.parts == [
        ["content", "Checking."],
        ["call", "get_forecast"],
        ["arguments", '{"town": "Os\\"lo\\n", "days": [3, {"a": null}]}'],
        ["end", ""],
        ["call", "list_trains"],
        ["arguments", "{}"],
        ["end", ""],
    ]


def test_thinking_ends_at_its_tag_and_loses_the_newlines_around_it() -> None:
    found = parse(
        ["\n\nhm\n", "\n</think>\n\nyes"],
        thinking_initial_stage=ThinkingInitialStage.ReasoningStart,
    )
    assert found.parts == [["reasoning", "hm"], ["content", "yes"]]


def test_continued_thinking_keeps_its_leading_newline() -> None:
    found = parse(
        ["\nfar</think>\ndone"],
        thinking_initial_stage=ThinkingInitialStage.ReasoningContinuation,
    )
    assert found.parts == [["reasoning", "\nfar"], ["content", "done"]]


def test_stray_think_end_vanishes_from_an_answer() -> None:
    assert parse(["a</thi", "nk>b"]).parts == [["content", "ab"]]


def test_markup_is_text_when_no_tools_are_declared() -> None:
    assert parse([CALL], parse_tool_calls=False).text("content") == CALL.lstrip("\n")


def test_forced_call_begins_inside_the_block() -> None:
    inside = CALL.split("calls>\n", 1)[1]
    found = parse([inside], starts_in_tool_calls=True)
    assert [name for kind, name in found.parts if kind == "call"] == ["get_forecast", "list_trains"]


def test_earliest_completed_stop_sequence_wins() -> None:
    sink = Collected()
    parser = OutputParser(ParsingOptions(stop_sequences=["abcd", "bc"]), sink)
    parser.feed("xab")
    assert sink.text("content") == "x"  # `ab` may still become `abcd`
    parser.feed("cd")
    assert (sink.text("content"), parser.stopped_by) == ("xa", "bc")


def test_stop_sequence_is_not_looked_for_in_thinking_or_calls() -> None:
    found = parse(
        ["STOP</think>", CALL.replace("Os", "STOP"), "tail"],
        stop_sequences=["STOP"],
        thinking_initial_stage=ThinkingInitialStage.ReasoningStart,
    )
    assert found.text("reasoning") == "STOP"
    assert json.loads(found.arguments()[0])["town"] == 'STOP"lo\n'


def test_half_a_stop_sequence_leaves_at_the_end() -> None:
    assert parse(["almost EN"], stop_sequences=["END"]).text("content") == "almost EN"


def test_json_mode_blanks_what_stands_around_the_json() -> None:
    text = 'Sure:\n```json\n{"dish": "pie"}\n```\nEnjoy'
    found = parse([text], parse_json_output=True, parse_tool_calls=False)
    assert found.text("content").strip() == '{"dish": "pie"}'


def test_run_of_newlines_is_read_in_linear_time() -> None:
    sink = Collected()
    parser = OutputParser(ParsingOptions(), sink)
    parser.feed("a")
    for _ in range(50_000):
        parser.feed("\n")
    parser.feed("b")
    assert sink.text("content") == "a" + "\n" * 50_000 + "b"


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('<｜DSML｜ parameter name="a b" string="true">v</｜DSML｜ parameter>', {"a b": "v"}),
        ('<｜DSML｜ parameter name="q"x" string="true">v</｜DSML｜ parameter>', {'q"x': "v"}),
        ('<｜DSML｜ parameter name="k">v</｜DSML｜ parameter>', {"k": "v"}),
    ],
)
def test_odd_parameter_names_stay_valid_json_even_without_recovery(
    body: str, arguments: dict[str, str]
) -> None:
    head, tail = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n', "\n</｜DSML｜ invoke>"
    text = f"{head}{body}{tail}\n</｜DSML｜ calls>"
    assert json.loads(parse([text]).arguments()[0]) == arguments


def recovered(text: str) -> tuple[Collected, list[str]]:
    sink = Collected()
    parser = OutputParser(ParsingOptions(recover_tool_calls=True), sink)
    parser.feed(text)
    parser.finish(mends=True)
    return sink, parser.repairs


def test_value_that_is_not_json_becomes_a_string_and_is_reported() -> None:
    sink, repairs = recovered(
        '<｜DSML｜ calls><｜DSML｜ invoke name="f">'
        '<｜DSML｜ parameter name="n" string="false">soon</｜DSML｜ parameter></｜DSML｜ invoke>'
    )
    assert json.loads(sink.arguments()[0]) == {"n": "soon"}
    assert repairs == ["a value that is not JSON became a string"]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("1e400", 1.7976931348623157e308),
        ('{"a": [-2.5E+999, "1e999", 3], "b\\"1e999": 1e-999}', None),
        ("9" * 400, 1.7976931348623157e308),
    ],
)
def test_a_number_beyond_a_double_becomes_the_largest_one(value: str, meant: float | None) -> None:
    sink, repairs = recovered(
        '<｜DSML｜ calls><｜DSML｜ invoke name="f"><｜DSML｜ parameter name="n" string="false">'
        f"{value}</｜DSML｜ parameter></｜DSML｜ invoke>"
    )
    expected = meant or {"a": [-1.7976931348623157e308, "1e999", 3], 'b"1e999': 0.0}
    assert json.loads(sink.arguments()[0]) == {"n": expected}
    assert repairs == ["a number beyond a double became the largest one"]


@given(st.text(alphabet='"\\{}[]:,-0123456789eE. a', max_size=60))
def test_what_is_mended_is_json_whatever_the_value(value: str) -> None:
    sink, _ = recovered(
        '<｜DSML｜ calls><｜DSML｜ invoke name="f"><｜DSML｜ parameter name="n" string="false">'
        f"{value}</｜DSML｜ parameter></｜DSML｜ invoke>"
    )
    got = json.loads(sink.arguments()[0])["n"]
    assert got == value or not isinstance(got, str) or json.loads(value) == got


def test_unclosed_parameter_ends_where_the_next_tag_begins() -> None:
    sink, repairs = recovered(
        '<｜DSML｜ calls><｜DSML｜ invoke name="f">'
        '<｜DSML｜ parameter name="a" string="true">one\n'
        '<｜DSML｜ parameter name="b" string="true">two</｜DSML｜ invoke>\n</｜DSML｜ calls> tail'
    )
    assert json.loads(sink.arguments()[0]) == {"a": "one", "b": "two"}
    assert len(repairs) == 2
    assert sink.text("content") == " tail"


def test_second_block_of_calls_and_the_text_between_are_kept() -> None:
    sink, repairs = recovered(CALL + "\n\nand again" + CALL)
    assert sink.text("content") == "and again"
    assert [name for kind, name in sink.parts if kind == "call"] == [
        *("get_forecast", "list_trains"),
        *("get_forecast", "list_trains"),
    ]
    assert repairs == []


def test_markup_that_opens_no_call_is_text() -> None:
    sink, repairs = recovered("x <｜DSML｜bogus>y")
    assert sink.text("content") == "x <｜DSML｜bogus>y"
    assert repairs == ["markup that opens no call was kept as text"]


def test_empty_stop_sequence_and_empty_spelling_are_misuse() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        ParsingOptions(stop_sequences=["a", ""])
    with pytest.raises(ValueError, match="ThinkingEnd must not be empty"):
        SpecialTokens(thinking_end="")


def test_newlines_before_a_tag_that_ends_an_unclosed_value_vanish_in_any_cut() -> None:
    value = '<｜DSML｜ invoke name="f"><｜DSML｜ parameter name="k" string="true">a\n\n\n'
    for end, wanted in (
        ('<｜DSML｜ invoke name="g">', "a\n"),
        ("<｜DSML｜ invoke", "a\n\n\n"),
        ("</｜DSML｜ parameter>", "a\n\n\n"),
        ("", "a\n\n\n"),
    ):
        for pieces in ([value + end], list(value + end)):
            found = parse(pieces, recover_tool_calls=True, stop_sequences=())
            assert json.loads(found.arguments()[0]) == {"k": wanted}
