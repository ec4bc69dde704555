"""Every beginning of a JSON value can be completed into a whole one."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe.base.json_closing import closing_of

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.integers(1, 10**6), st.booleans())
def test_any_beginning_of_a_value_is_completed(value: object, end: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    beginning = text[: 1 + end % len(text)]
    json.loads(beginning + closing_of(beginning))


@given(VALUES)
def test_whole_value_needs_nothing(value: object) -> None:
    assert closing_of(json.dumps(value)) == ""
