"""The input of a custom tool comes out of its JSON arguments the same, however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_recipe.protocols.common.custom_input import CustomInput


def fed(text: str, cuts: list[int]) -> str:
    reader = CustomInput()
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return "".join(reader.feed(text[a:b], None) for a, b in pairwise(edges))


TEXTS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    '"\\\\/\\n\\tu😀\\x00d8', max_size=30
)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 500), max_size=20))
def test_any_input_is_decoded_in_any_cut(value: str, escapes: bool, cuts: list[int]) -> None:
    text = json.dumps({"input": value, "other": 1}, ensure_ascii=escapes)
    assert fed(text, cuts) == value


@given(st.lists(st.integers(0, 500), max_size=9))
def test_arguments_that_begin_in_another_way_are_reported_as_they_are(cuts: list[int]) -> None:
    for text in ("{}", '{"town": "x"}', '{"input": 3}', '{"inp": "x", "input": "y"}'):
        assert fed(text, cuts) == text


@given(st.text('\\\\"ud8D0cC \\n{}x', max_size=40), st.lists(st.integers(0, 500), max_size=9))
def test_broken_strings_raise_nothing_and_lose_only_their_end(tail: str, cuts: list[int]) -> None:
    text = '{"input": "ok' + tail
    out = fed(text, cuts)
    assert out.startswith("ok")
    out.encode()
    assert out == fed(text, [])
