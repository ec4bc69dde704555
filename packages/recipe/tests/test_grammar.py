"""Output constraints as text: no library of grammars is needed, or loaded, to make them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionOptions,
    GrammarError,
    GrammarTooComplex,
    ModelVersion,
    OutputConstraint,
    ParsingOptions,
    RecipeError,
    ThinkingInitialStage,
    constraint_grammar,
    error_response,
    request_grammar,
)
from deepinfer_recipe.grammar.rewrite import SchemaRewriter, safe_pattern

V41 = ModelVersion.DeepseekV41Flash


def grammar(kind, schema, version=V41, **options):
    text = constraint_grammar(
        OutputConstraint(kind, schema), parsing_options=ParsingOptions(**options), version=version
    )
    return json.loads(text)["format"]


def tools(*parameters):
    return json.dumps(
        [
            {"type": "function", "function": {"name": f"t{i}", "parameters": one}}
            for i, one in enumerate(parameters)
        ]
    )


def spelled(node):
    """What a node writes where it leaves no choice; None where it leaves one."""
    match node["type"]:
        case "const_string":
            return node["value"]
        case "token":
            return node["token"]
        case "sequence":
            parts = [spelled(element) for element in node["elements"]]
            return None if None in parts else "".join(parts)
        case "plus" | "or":
            inner = node.get("content") or node["elements"][0]
            return spelled(inner) if node["type"] == "plus" or len(node["elements"]) == 1 else None
    return None


def test_making_a_grammar_loads_no_library():
    script = (
        "import sys; from deepinfer_recipe import *;"
        "constraint_grammar(OutputConstraint('json', ''), parsing_options=ParsingOptions(),"
        " version=ModelVersion.DeepseekV4Pro);"
        "print([m for m in ('torch', 'xgrammar', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (
            ModelVersion.DeepseekV4Pro,
            '<｜DSML｜invoke name="t0">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        ),
        (V41, '<｜DSML｜ invoke name="t0">\n\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'),
    ],
)
def test_a_call_without_parameters_is_spelled_as_the_renderer_spells_it(version, text):
    made = grammar("tool_call_required", tools({}), version, starts_in_tool_calls=True)
    assert spelled(made) == text


def test_thinking_comes_first_and_is_free_but_for_its_end():
    made = grammar("json", "", thinking_initial_stage=ThinkingInitialStage.ReasoningStart)
    thought, end, answer = made["elements"]
    assert thought == {"type": "any_text", "excludes": ["</think>"]}
    assert end == {"type": "token", "token": "</think>"}
    assert answer == grammar("json", "")


@pytest.mark.parametrize("stage", [None, ThinkingInitialStage.ContentContinuation])
def test_where_the_answer_has_begun_there_is_no_thinking(stage):
    assert grammar("json", "", thinking_initial_stage=stage)["type"] == "json_schema"


def test_the_beginning_of_a_continued_answer_is_part_of_it():
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": [
            {"role": "user", "content": "json"},
            {"role": "assistant", "content": '{"a": ', "prefix": True},
        ],
        "thinking": {"type": "disabled"},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object"}},
        },
    }
    request = ChatCompletionRequest(json.dumps(body)).convert(ConversionOptions())
    made = request_grammar(request)
    assert made is not None
    assert made.prefix == '{"a": '


def test_a_request_without_a_constraint_has_no_grammar():
    body = {"model": "DeepSeek-V4-Pro", "messages": [{"role": "user", "content": "hi"}]}
    request = ChatCompletionRequest(json.dumps(body)).convert(ConversionOptions())
    assert request_grammar(request) is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "types 'string' and 'integer'"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different `pattern`"),
    ],
)
def test_contradictions_are_named(schema, problem):
    with pytest.raises(GrammarError, match=problem) as caught:
        grammar("json", json.dumps(schema))
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"properties": {'a"b': {}}}, "cannot write the name"),
        ({"properties": {"a": {"enum": ["<｜DSML｜"]}}}, "spells the markup"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "does not exist"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "Retrieval is disabled"),
        (
            {"properties": {"a": {"$ref": "#here"}}, "$defs": {"b": {"$anchor": "here"}}},
            "only `#/...` is followed",
        ),
        (
            {"properties": {"a": {"$ref": "#/anyOf/0"}}, "anyOf": [{"type": "object"}]},
            "no named schema",
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
            "in a circle",
        ),
        ({"properties": {"a": False}, "required": ["a"]}, "no value is allowed"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "move what it means"),
    ],
)
def test_a_tool_that_cannot_be_written_is_named(parameters, problem):
    with pytest.raises(GrammarError, match=problem) as caught:
        grammar("tool_call", tools({}, {"type": "object", **parameters}))
    assert "tool 't1'" in str(caught.value)
    assert caught.value.param == "tools"
    status, body = error_response("chat", caught.value)
    assert (status, body["error"]["param"]) == (400, "tools")


def test_a_grammar_beyond_the_size_limit_is_too_complex():
    with pytest.raises(GrammarTooComplex, match="bytes") as caught:
        grammar("json", json.dumps({"enum": [f"{n:0100}" for n in range(12_000)]}))
    assert error_response("messages", caught.value)[0] == 400
    assert error_response("chat", caught.value)[1]["error"]["code"] == "schema_too_complex"


@pytest.mark.parametrize("keyword", ["properties", "items", "anyOf", "allOf"])
def test_depth_is_limited(keyword):
    schema: object = {"type": "string"}
    for _ in range(100):
        schema = {keyword: {"a": schema} if keyword == "properties" else [schema]}
        if keyword == "items":
            schema = {"items": schema[keyword][0]}
    if keyword == "allOf":  # all of one thing is that thing
        assert SchemaRewriter(schema).enforceable(schema) == {"type": "string"}
        return
    with pytest.raises(GrammarError, match=r"flatter"):
        grammar("json", json.dumps(schema))


def test_optional_groups_are_counted():
    assert safe_pattern(r"(a+b)?c\)?[)?]x?(d)??") == r"(a+b){0,1}c\)?[)?]x?(d)??"


def test_what_is_required_is_declared():
    assert SchemaRewriter({}).enforceable({"type": "object", "required": ["b"]})["properties"] == {
        "b": True
    }
    made = SchemaRewriter({}).enforceable(
        {"required": ["b"], "additionalProperties": {"type": "null"}}
    )
    assert made["properties"] == {"b": {"type": "null"}}


SMALL = st.recursive(
    st.sampled_from(
        [
            {"type": "integer"},
            {"type": "integer", "minimum": 2},
            {"type": "number", "maximum": 5},
            {"type": ["integer", "null"]},
            {"type": "string", "minLength": 2},
            {"enum": [1, 2, "ab", None]},
            True,
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b], "type": "integer"}, inner, inner),
        st.builds(
            lambda a: {"type": "object", "properties": {"a": a}, "required": ["a", "b"]}, inner
        ),
    ),
    max_leaves=4,
)
VALUES = st.sampled_from(
    [None, 1, 2, 3, 5, 7, 1.5, "a", "ab", {}, {"a": 2}, {"a": 2, "b": 1}, {"a": "ab", "b": None}]
)


@settings(max_examples=300, deadline=None)
@given(schema=SMALL, value=VALUES)
def test_a_rewritten_schema_allows_the_same_values(schema, value):
    try:
        made = SchemaRewriter(schema).enforceable(schema)
    except GrammarError:
        assert not jsonschema_rs.is_valid(schema, value)
        return
    assert jsonschema_rs.is_valid(made, value) == jsonschema_rs.is_valid(schema, value)


@given(left=SMALL, right=SMALL, value=VALUES)
@settings(max_examples=200, deadline=None)
def test_merging_allows_what_both_allow(left, right, value):
    try:
        made = SchemaRewriter({}).merge(left, right)
    except GrammarError:
        return
    both = jsonschema_rs.is_valid(left, value) and jsonschema_rs.is_valid(right, value)
    assert jsonschema_rs.is_valid(made, value) == both


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "items",
                    "anyOf",
                    "oneOf",
                    "allOf",
                    "$ref",
                    "enum",
                    "const",
                    "required",
                    "format",
                    "pattern",
                    "minLength",
                    "additionalProperties",
                    "$defs",
                    "a",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@example(schema={"anyOf": [False]}, kind="tool_call")
@example(schema={"anyOf": [True, {"properties": {"a": {}}}]}, kind="tool_call")
@given(schema=JSON, kind=st.sampled_from(["json", "tool_call"]))
def test_nothing_but_errors_of_this_package_leaves(schema, kind):
    text = json.dumps(schema) if kind == "json" else tools(schema)
    with contextlib.suppress(RecipeError):
        grammar(kind, text)
