"""What a schema asks of the grammar is paid as it goes, and what cannot be held is refused."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    GrammarError,
    GrammarTooComplex,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    constraint_grammar,
)
from deepinfer_recipe.grammar import budget
from deepinfer_recipe.grammar.budget import Budget
from deepinfer_recipe.grammar.pattern_size import pattern_size
from deepinfer_recipe.grammar.rewrite import SchemaRewriter

Schema = dict[str, Any]


def grammar(kind: str, schema: Schema) -> str:
    text = json.dumps(schema)
    if kind == "tool_call":
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        text = json.dumps([tool])
    return constraint_grammar(
        OutputConstraint(kind, text),  # type: ignore[arg-type]
        parsing_options=ParsingOptions(),
        version=ModelVersion.DeepseekV41Flash,
    )


def whole(defs: Schema, first: str) -> Schema:
    return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{first}"}}, "$defs": defs}


def doubling(levels: int) -> Schema:
    """Each definition is two times the next."""
    defs: Schema = {f"a{levels}": {"type": "string"}}
    for level in range(levels):
        below = {"$ref": f"#/$defs/a{level + 1}"}
        defs[f"a{level}"] = {"anyOf": [below, below]}
    return whole(defs, "a0")


def differing(levels: int) -> Schema:
    """Twice the next, and each time with something beside it: no two are alike."""
    defs: Schema = {f"a{levels}": {"type": "string"}}
    for level in range(levels):
        below = f"#/$defs/a{level + 1}"
        defs[f"a{level}"] = {
            "anyOf": [{"$ref": below, "title": "x"}, {"$ref": below, "description": "y"}]
        }
    return whole(defs, "a0")


def nested_products(levels: int) -> Schema:
    """Alternatives beside properties: each level is copied into both."""
    schema: Schema = {"type": "string"}
    for _ in range(levels):
        schema = {
            "type": "object",
            "properties": {"a": schema},
            "anyOf": [{"required": ["a"]}, {"minimum": 1}],
        }
    return schema


def recursive() -> Schema:
    return whole({"a": {"anyOf": [{"$ref": "#/$defs/a", "title": "t"}] * 2}}, "a")


HOSTILE = {
    "doubling 40": doubling(40),
    "differing 40": differing(40),
    "nested products 25": nested_products(25),
    "recursion": recursive(),
    "pattern": {"type": "string", "pattern": "([a-z]{500}){500}"},
    "patterns": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "[a-z]{5000}"} for i in range(50)},
    },
    "enum": {"enum": ["x" * 1000 + str(i) for i in range(1100)]},
    "carried definitions": {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for i in range(99)
        },
        "$defs": {"d": {"enum": [f"value {i}" for i in range(2000)]}},
    },
    "alternatives": {"oneOf": [{"const": i} for i in range(400)]},
}


@pytest.mark.parametrize("kind", ["json", "tool_call"])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_written_or_refused_within_its_budget(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    paid: list[int] = []
    pay = Budget.pay_nodes

    def counted(self: Budget, count: int = 1) -> None:
        paid.append(count)
        pay(self, count)

    monkeypatch.setattr(Budget, "pay_nodes", counted)
    schema = HOSTILE[name]
    if kind == "tool_call" and schema.get("type") != "object":
        schema = {"type": "object", "properties": {"a": schema}}
    with contextlib.suppress(GrammarError):
        assert len(grammar(kind, schema)) <= budget.MAX_GRAMMAR_BYTES
    # One payment may be the one too many; all others are within the limit.
    assert sum(paid[:-1]) <= budget.MAX_NODES


def test_shared_definitions_are_written_once() -> None:
    assert len(grammar("tool_call", doubling(60))) < 2500


def test_long_bounds_are_counted_and_not_unrolled() -> None:
    schema = {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 2, "maxLength": 5000},
            "list": {"type": "array", "items": {"type": "string", "maxLength": 5000}},
        },
    }
    made = grammar("tool_call", schema)
    assert '"max_chars":4998' in made
    assert '"maxLength":5000' in made


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"minLength": 33}, "`minLength` 33"),
        ({"minLength": 4, "maxLength": 3}, "`minLength` 4 and `maxLength` 3"),
    ],
)
def test_a_length_of_text_that_cannot_be_held_is_refused(bounds: Schema, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        grammar("tool_call", {"type": "object", "properties": {"a": {"type": "string", **bounds}}})


@pytest.mark.parametrize("kind", ["json", "tool_call"])
def test_json_has_no_runs_of_blanks(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}}
    made = grammar(kind, schema)
    assert made.count('"max_whitespace_cnt":1') == made.count('"max_whitespace_cnt"') == 1


@pytest.mark.parametrize(
    "name", ["differing 40", "nested products 25", "patterns", "carried definitions"]
)
def test_each_limit_is_told_as_such(name: str) -> None:
    schema = HOSTILE[name]
    if schema.get("type") != "object":
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(GrammarTooComplex):
        grammar("tool_call", schema)


NOT_HELD: list[tuple[str, Schema]] = [
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("maxProperties", {"type": "object", "maxProperties": 2}),
    ("uniqueItems", {"type": "array", "uniqueItems": True}),
    ("contains", {"type": "array", "contains": {"type": "string"}}),
    ("minContains", {"type": "array", "minContains": 1}),
    ("maxContains", {"type": "array", "maxContains": 1}),
    ("not", {"not": {"type": "string"}}),
    ("if", {"if": {"type": "string"}, "then": {"minLength": 2}}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("dependentSchemas", {"type": "object", "dependentSchemas": {"a": {}}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("multipleOf", {"type": "integer", "multipleOf": 3}),
    ("multipleOf", {"type": "number", "multipleOf": 0.5}),
    ("minLength", {"type": "string", "pattern": "^[a-z]+$", "minLength": 2}),
    ("maxLength", {"type": "string", "format": "email", "maxLength": 3}),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("oneOf", {"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}),
]
HELD: list[Schema] = [
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "maxProperties": 1},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "array", "uniqueItems": False},
    {"type": "integer", "multipleOf": 1},
    {"if": {"type": "string"}},
    {"type": "string", "pattern": "^[a-z]{2,5}$", "minLength": 2, "maxLength": 5},
    {"type": "string", "format": "uuid", "minLength": 36, "maxLength": 36},
    {"type": "string", "format": "email", "maxLength": 254},
    {"type": "string", "format": "uri"},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ]
    },
    {"oneOf": [{"$ref": "#/$defs/s"}, {"type": "null"}], "$defs": {"s": {"type": "string"}}},
]


@pytest.mark.parametrize("kind", ["json", "tool_call"])
@pytest.mark.parametrize(("keyword", "schema"), NOT_HELD)
def test_a_keyword_that_cannot_be_held_is_refused_by_name(
    keyword: str, schema: Schema, kind: str
) -> None:
    whole = schema if kind == "json" else {"type": "object", "properties": {"a": schema}}
    with pytest.raises(GrammarError, match=f"`{keyword}`"):
        grammar(kind, whole)


def test_a_keyword_of_the_parameters_themselves_is_refused_too() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string", "maxLength": 3},
        "minProperties": 2,
        "maxProperties": 4,
    }
    with pytest.raises(GrammarError, match=r"tool 'f': .*`minProperties`"):
        grammar("tool_call", schema)


@pytest.mark.parametrize("kind", ["json", "tool_call"])
@pytest.mark.parametrize("schema", HELD)
def test_a_keyword_that_holds_by_itself_is_no_reason_to_refuse(schema: Schema, kind: str) -> None:
    if kind == "json":
        grammar(kind, schema)
        return
    defs = schema.get("$defs", {})
    grammar(kind, {"type": "object", "properties": {"a": schema}, "$defs": defs})


PARTS = st.recursive(
    st.sampled_from(["a", "[bc]", r"\d", ".", r"\.", "(?:x|yz)", "^", "$"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds(
            "(?:{}){}".format, inner, st.sampled_from(["{2}", "{1,3}", "{2,}", "*", "+", "?"])
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=120, deadline=None)
@given(pattern=PARTS, data=st.data())
def test_what_a_pattern_matches_lies_between_its_bounds(pattern: str, data: st.DataObject) -> None:
    size = pattern_size(pattern)
    text = data.draw(st.from_regex(f"\\A(?:{pattern})\\Z", alphabet="abcxyz0."))
    assert size.shortest <= len(text) <= size.longest


@pytest.mark.parametrize("pattern", ["(a{9}", "[a", "a{2000}{2000}{2000}", "(" * 200, "a)b", "\\"])
def test_odd_patterns_have_a_size_too(pattern: str) -> None:
    size = pattern_size(pattern)
    assert size.shortest <= size.longest
    assert size.states > 0


OBJECTS = st.builds(
    lambda key, value, more: {
        "type": "object",
        "properties": {key: value},
        "required": [key],
        **({"additionalProperties": False} if more else {}),
    },
    st.sampled_from(["k", "j"]),
    st.sampled_from([{"const": 1}, {"const": 2}, {"type": "string"}, {"minimum": 3}]),
    st.booleans(),
)
MEMBERS = st.one_of(
    OBJECTS,
    st.sampled_from(
        [
            {"type": "string"},
            {"type": "integer", "maximum": 3},
            {"type": "number", "exclusiveMinimum": 3},
            {"type": "number", "minimum": 3},
            {"enum": [1, "a", None]},
            {"const": True},
            {"type": ["null", "boolean"]},
        ]
    ),
)
VALUES = st.sampled_from(
    [None, True, 1, 2, 3, 3.5, 4, "a", {"k": 1}, {"k": 2}, {"k": "s"}, {"j": 1, "k": 1}, {"j": 5}]
)


@settings(max_examples=200, deadline=None)
@given(left=MEMBERS, right=MEMBERS, value=VALUES)
def test_alternatives_that_are_let_through_share_no_value(
    left: Schema, right: Schema, value: Any
) -> None:
    schema = {"oneOf": [left, right]}
    try:
        SchemaRewriter(schema).enforceable(schema)
    except GrammarError:
        return
    fits = [jsonschema_rs.is_valid(one, value) for one in (left, right)]
    assert fits != [True, True]
