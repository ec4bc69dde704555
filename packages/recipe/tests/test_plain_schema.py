"""The short cut for plain schemas only ever says yes to what the validator accepts."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe.protocols.common.plain_schema import _KEYWORDS, is_plain_schema
from deepinfer_recipe.protocols.common.schema_check import schema_problem

NAMES = st.sampled_from(["string", "object", "array", "null", "integer", "a", "b", "", "é"])
KEYWORDS = st.sampled_from([*_KEYWORDS, "$ref", "pattern", "$defs", "format", "unknown"])
LEAVES = st.one_of(
    NAMES,
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(NAMES, max_size=3),
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(KEYWORDS, inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=2),
        st.fixed_dictionaries({"properties": st.dictionaries(NAMES, inner, max_size=2)}),
        st.lists(inner, max_size=2),
    ),
    max_leaves=8,
)


def accepted(schema: Any) -> bool:
    try:
        jsonschema_rs.validator_for(schema)
    except ValueError:
        return False
    return True


@settings(max_examples=500, deadline=None)
@given(SCHEMAS)
def test_a_schema_called_plain_is_accepted_by_the_validator(schema: Any) -> None:
    if is_plain_schema(schema):
        assert accepted(schema)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(sorted(_KEYWORDS)), SCHEMAS)
def test_no_keyword_is_called_plain_with_a_value_the_validator_refuses(
    keyword: str, value: Any
) -> None:
    if is_plain_schema({keyword: value}):
        assert accepted({keyword: value})


def test_usual_tool_schemas_take_the_short_cut() -> None:
    schema = {
        "type": "object",
        "properties": {
            "town": {"type": "string", "description": "where", "minLength": 1},
            "days": {"type": ["integer", "null"], "minimum": 0, "default": 3},
            "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True},
            "either": {"anyOf": [{"type": "number"}, {"const": {}}]},
        },
        "required": ["town"],
        "additionalProperties": False,
    }
    assert is_plain_schema(schema)
    assert schema_problem(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a"},
        {"pattern": "("},
        {"type": "thing"},
        {"type": []},
        {"type": ["string", "string"]},
        {"required": ["a", "a"]},
        {"minLength": -1},
        {"minLength": True},
        {"minimum": False},
        {"anyOf": []},
        {"properties": {"a": 3}},
        {"items": [{}]},
        {"$schema": "https://example.com/none"},
    ],
)
def test_what_may_be_invalid_is_left_to_the_validator(schema: Any) -> None:
    assert not is_plain_schema(schema)
    assert not is_plain_schema({"items": {"anyOf": [schema]}})


def test_very_deep_schemas_are_left_to_the_validator() -> None:
    schema: Any = {}
    for _ in range(100):
        schema = {"items": schema}
    assert not is_plain_schema(schema)
    assert schema_problem(schema) is None
