"""Reading bodies as strictly as a server must."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deepinfer_recipe import ChatCompletionRequest, RequestParseError
from deepinfer_recipe.base.json_text import load_body, loads, parse_object, prompt_json

BODY = b'{"model": "m", "messages": [%s]}'


@pytest.mark.parametrize(
    "text",
    [
        "[1,]",
        '{"a": 1} x',
        "\ufeff{}",
        "NaN",
        "1e999",
        "9" * 400,
        '"\\ud800"',
        '"\\udc00\\ud800"',
        "[" * 128 + "]" * 128,
        "[" * 100_000,
        '"\x01"',
        "",
        "'a'",
    ],
)
def test_text_that_is_not_strict_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        loads(text)


def test_deepest_allowed_nesting_and_paired_surrogates_are_read() -> None:
    assert loads('"\\ud83d\\ude00"') == "😀"
    loads("[" * 127 + "]" * 127)


def test_last_of_equal_keys_wins() -> None:
    assert loads('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1.50", "1.5"),
        ("1e2", "100.0"),
        ("1e100", "1e+100"),
        ("-0", "-0.0"),
        ("18446744073709551615", "18446744073709551615"),
        ("123456789012345678901234567890", "1.2345678901234568e+29"),
        ('{"é": [1, null]}', '{"é": [1, null]}'),
    ],
)
def test_numbers_are_shown_in_prompts_as_recorded(text: str, shown: str) -> None:
    assert prompt_json(loads(text)) == shown


def test_arguments_that_are_no_object_are_none() -> None:
    assert [parse_object(text) for text in ("[1]", "nope", "", '{"a": NaN}')] == [None] * 4
    assert parse_object('{"a": 1}') == {"a": 1}


@pytest.mark.parametrize(
    "body", [b"\xff", b"", b"[]", b"3", b"null", b"{", "x", None, [], 3, bytearray(b"{"), {1, 2}]
)
def test_body_that_is_not_an_object_is_a_parse_error(body: Any) -> None:
    with pytest.raises(RequestParseError, match=r"^invalid (JSON request|request body): "):
        ChatCompletionRequest(body)


def test_dict_body_follows_the_same_rules_as_its_json() -> None:
    for value in (math.nan, object(), b"x", "\ud800", {1, 2}):
        with pytest.raises(RequestParseError):
            load_body({"a": value})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    loaded = load_body(body)
    assert loaded == json.loads(json.dumps(body))
    assert loaded is not body
