"""The compiled JSON routines give what their Python forms give, or refuse; they never crash."""

from __future__ import annotations

import enum
import gc
import json
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import native
from deepinfer_recipe.base import json_text
from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.native import build

compiled: Any = native.routines
needs_compiled = pytest.mark.skipif(compiled is None, reason=f"this is {native.STATE}")

EDGES = ["", "\0", "\x1f", "\x7f", "\x80", "ÿ", "Ā", "\ud7ff", "\ue000", "\uffff", "\U00010000"]
LONE = ["\ud800", "\udbff", "\udc00", "\udfff"]
CHARACTERS = st.one_of(
    st.sampled_from([*'"\\/\b\f\n\r\t</', *EDGES[1:], *LONE]),
    st.characters(),
    st.characters(categories=["Cs"]),
)
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=80),
    st.builds(
        lambda text, n, end: text * n + end, st.text(CHARACTERS), st.integers(0, 40), CHARACTERS
    ),
)
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, 10**400]),
    st.floats(),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ODD = st.one_of(
    st.just((1, 2)),
    st.just(b"bytes"),
    st.just({1: "a", None: "b", False: "c"}),
    st.just(enum.IntEnum("E", "A").A),
    st.just(type("S", (str,), {})("text")),
    st.just(OrderedDict(a=[1])),
    st.just({"a", "b"}),
)
VALUES = st.recursive(
    st.one_of(LEAVES, LEAVES, LEAVES, ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
JSON_PIECES = st.sampled_from(
    [
        *(*'{}[]:,"', *" \t\r\n", "\\", "true", "false", "null", "NaN", "-Infinity"),
        *("0", "-0", "00", "1.5", "1.", ".5", "-", "1e5", "1E+400", "1e", "2e-999", "+1", "0x1"),
        *("1_0", "18446744073709551615", "18446744073709551616", "-9223372036854775808"),
        *("9" * 30, "1" * 80, '"a"', '"a":', '"a":1,', "\\u0041", "\\ud83d", "\\ude00"),
        *("\\ud83d\\ude00", "\\uD8", "\\x", "[" * 126, "]" * 126, '{"a":' * 128, "é", "这"),
        *("😀", "\ud800", "\x00", "\x1f", "\x7f", "\ufeff", "\xa0"),
    ]
)


def outcome(function: Callable[[Any], Any], argument: Any) -> Any:
    """What a call gave, types, order and bits of doubles included, or the error it raised."""
    try:
        return exact(function(argument))
    except Exception as error:
        return type(error), str(error)


def exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {"dict": [(exact(key), exact(member)) for key, member in value.items()]}
    if isinstance(value, list):
        return [exact(member) for member in value]
    if isinstance(value, float):
        return type(value), struct.pack("d", value)
    return type(value), value


def refuses(function: Callable[[Any], Any], argument: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        function(argument)


def reads_as_the_same(text: Any) -> None:
    loads, load_body = json_text._loads, json_text._load_body
    if isinstance(text, str):
        assert outcome(json_text.loads, text) == outcome(loads, text)
    assert outcome(json_text.load_body, text) == outcome(load_body, text)


@needs_compiled
@settings(max_examples=400, deadline=None)
@given(st.lists(JSON_PIECES, max_size=12).map("".join))
def test_reading_any_pieces_of_json_gives_the_same_value_or_error(text: str) -> None:
    reads_as_the_same(text)
    reads_as_the_same(text.encode("utf-8", "surrogatepass"))


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(VALUES, st.booleans(), st.data())
def test_reading_written_and_damaged_values_gives_the_same(
    value: Any, ascii_only: bool, data: st.DataObject
) -> None:
    try:
        text = json.dumps(value, ensure_ascii=ascii_only)
    except TypeError:
        return
    reads_as_the_same(text)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    reads_as_the_same(bytes(raw))
    reads_as_the_same(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@needs_compiled
@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_reading_any_bytes_gives_the_same(raw: bytes) -> None:
    reads_as_the_same(raw)
    reads_as_the_same(b'["' + raw + b'"]')


@needs_compiled
@settings(max_examples=400, deadline=None)
@given(VALUES)
def test_writing_and_copying_any_value_gives_the_same(value: Any) -> None:
    for function, twin in (
        (json_text.prompt_json, json_text._prompt_encoder),
        (json_text.compact_json, json_text._compact_encoder),
        (json_text.load_body, json_text._load_body),
    ):
        assert outcome(function, value) == outcome(twin, value)


@needs_compiled
@settings(max_examples=400, deadline=None)
@given(TEXTS, TEXTS, TEXTS)
def test_quoting_any_text_gives_the_same(head: str, text: str, tail: str) -> None:
    assert compiled.quote(text) == json_text.encode_basestring(text)
    made = compiled.between(head, text, tail)
    assert made == json_text._between(head, text, tail)
    # A string that is wider than its characters would be unequal to itself read again.
    assert hash(made) == hash(json_text._between(head, text, tail))
    assert sys.getsizeof(made) == sys.getsizeof("".join(list(made)))


@needs_compiled
@pytest.mark.parametrize("edge", [*EDGES, *LONE, '"', "\\", "\n"])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000, 2_000_000])
def test_every_character_is_found_at_the_edges_of_a_block(edge: str, length: int) -> None:
    for text in (edge + "a" * length, "a" * length + edge, "a" * length + edge + "这" * 40):
        assert compiled.quote(text) == json_text.encode_basestring(text)
        assert compiled.compact_json([text]) == json_text._compact_encoder([text])
        assert outcome(json_text.load_body, [text]) == outcome(json_text._load_body, [text])
        reads_as_the_same(json.dumps(text))
        reads_as_the_same(f'"{text}"')


@needs_compiled
def test_depth_counts_as_in_python() -> None:
    for depth in (126, 127, 128, 129, 5000):
        for opening, closing in ("[]", ('{"a":', "}")):
            text = opening * depth + "1" + closing * depth
            reads_as_the_same(text)
            reads_as_the_same(text[:-1])
            reads_as_the_same(opening * depth)


@needs_compiled
def test_deep_and_circular_values_are_left_to_python() -> None:
    value: list[Any] = []
    for _ in range(300):
        value = [value]
    assert json_text.compact_json(value) == "[" * 301 + "]" * 301
    value[0] = value
    with pytest.raises(ValueError, match="Circular"):
        json_text.compact_json(value)
    with pytest.raises(RequestParseError, match="Circular"):
        json_text.load_body(value)


@needs_compiled
def test_all_doubles_of_a_grid_read_and_write_alike() -> None:
    values = [m * 10.0**e for m in (1, -1.5, 1 / 3, math.pi) for e in range(-320, 308, 7)]
    text = json_text.compact_json(values)
    assert text == json_text._compact_encoder(values)
    assert exact(compiled.loads(text)) == exact(values)


@needs_compiled
def test_duplicate_keys_keep_the_first_place_and_the_last_value() -> None:
    long = "k" * 40
    text = f'{{"a": 1, "b": 2, "\\u0061": 3, "{long}": 4, "{long}": 5}}'
    assert list(json_text.loads(text).items()) == [("a", 3), ("b", 2), (long, 5)]
    reads_as_the_same('{"a": "\\ud800", "a": 1}')
    reads_as_the_same('{"a": ' + "[" * 200 + "]" * 200 + ', "a": 1}')


@needs_compiled
def test_a_copy_shares_nothing_that_can_change() -> None:
    body = {"a": [{"b": [1]}]}
    copy = json_text.load_body(body)
    body["a"][0]["b"].append(2)
    assert copy == {"a": [{"b": [1]}]}


@needs_compiled
def test_wrong_arguments_are_type_errors() -> None:
    for call in (
        lambda: compiled.quote(b"x"),
        lambda: compiled.between("a", "b"),
        lambda: compiled.between("a", 1, "b"),
        lambda: compiled.loads(),
    ):
        with pytest.raises(TypeError):
            call()
    for function in (compiled.loads, compiled.copy):
        with pytest.raises(ValueError, match=r".+"):
            function(bytearray(b"[]"))


@needs_compiled
def test_no_reference_is_lost_or_kept() -> None:
    class Text(str):
        __slots__ = ()

    marker = "mark" * 20
    whole = {"k": [marker, {"n": marker}], "long" * 20: marker}
    good = json.dumps(whole)
    calls: list[Callable[[], Any]] = [
        lambda: compiled.loads(good),
        lambda: refuses(compiled.loads, good[:-1] + "x"),
        lambda: compiled.copy(whole),
        lambda: refuses(compiled.copy, [whole, Text("x")]),
        lambda: compiled.compact_json(whole),
        lambda: refuses(compiled.prompt_json, [whole, object()]),
        lambda: compiled.between(marker, marker, marker),
    ]
    for call in calls:
        call()
    gc.collect()
    before, counts = len(gc.get_objects()), sys.getrefcount(marker)
    for _ in range(100):
        for call in calls:
            call()
    gc.collect()
    assert sys.getrefcount(marker) == counts
    assert abs(len(gc.get_objects()) - before) < 20


def test_the_compiled_part_is_there_wherever_it_can_be_built(tmp_path: Path) -> None:
    if native.STATE.startswith("pure Python: DEEPINFER_RECIPE_PURE"):
        assert compiled is None
        return
    failure = build.build(tmp_path)
    if failure is None:
        assert (tmp_path / build.library_name()).stat().st_size
        assert native.STATE == "compiled", "install the package again"
    else:
        assert compiled is None or build.find_compiler() is None, failure
