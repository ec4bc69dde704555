"""Strict schemas: what stays, in which order, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_recipe import ConversionError, Exchange, GrammarError, request_grammar
from deepinfer_recipe.protocols.common.strict_schema import StrictRules

PREFIX, ROOT = "Invalid tool parameters schema : ", "function parameters schema"
PARITY = StrictRules(PREFIX, ROOT, allows_empty_root=True, keeps_keywords=False, param="p")
ANSWER = StrictRules(PREFIX, ROOT, allows_empty_root=False, keeps_keywords=False, param="p")
EXTENDED = StrictRules(PREFIX, ROOT, allows_empty_root=True, keeps_keywords=True, param="p")


INT = {"type": "integer"}


def of(node: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": node}, **more}


@pytest.mark.parametrize(
    ("node", "kept"),
    [
        (
            {"title": "t", "enum": ["x"], "format": "uuid", "pattern": "x", "type": "string"},
            {"type": "string", "pattern": "x", "format": "uuid", "enum": ["x"]},
        ),
        (
            {"type": "string", "minLength": 1, "description": "d"},
            {"type": "string", "description": "d"},
        ),
        (
            {"multipleOf": 3, "minimum": 1, "const": 1, "type": "number", "enum": [1]},
            {"type": "number", "const": 1, "minimum": 1, "multipleOf": 3},
        ),
        ({"type": "boolean", "default": True}, {"type": "boolean"}),
        (
            {"type": "array", "minItems": 1, "items": {"type": "null"}, "description": "d"},
            {"type": "array", "items": {"type": "null"}, "description": "d"},
        ),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "t"},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        ({"anyOf": [{"type": "null"}], "type": "string"}, {"type": "string"}),
        ({"$ref": "#/$defs/x", "description": "d"}, {"$ref": "#/$defs/x"}),
        ({"type": ["string", "null"], "minLength": 1}, {"type": ["string", "null"]}),
        (
            {"type": "object", "properties": {"b": {"type": "integer"}}, "description": "q"},
            {
                "type": "object",
                "properties": {"b": {"type": "integer"}},
                "additionalProperties": False,
                "required": ["b"],
                "description": "q",
            },
        ),
    ],
)
def test_node_keeps_what_strict_mode_enforces_in_its_order(node: Any, kept: Any) -> None:
    expected = {
        "type": "object",
        "properties": {"a": kept},
        "additionalProperties": False,
        "required": ["a"],
    }
    assert json.dumps(PARITY.normalise(of(node))) == json.dumps(expected)


def test_only_a_tool_may_have_an_empty_root() -> None:
    with pytest.raises(ConversionError, match="no properties"):
        ANSWER.normalise({"type": "object"})
    assert PARITY.normalise({"type": "object"}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
        "required": [],
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({}, "one of `type`, `anyOf`, `$ref` field is required"),
        (True, "one of `type`, `anyOf`, `$ref` field is required"),
        ({"type": "string"}, "The top level of the function parameters schema must be an object."),
        ({"anyOf": [{"type": "object"}]}, "The top level of the function parameters schema"),
        (of({"enum": ["a"]}), "one of `type`, `anyOf`, `$ref` field is required"),
        (of({"type": "zzz"}), "unknown variant `zzz`"),
        (of({"type": "object"}), "An object with no properties is not allowed."),
        (of({"type": "array"}), "missing field `items`"),
        (of({"type": "string", "format": "date"}), "unknown variant `date`"),
        (of({"type": "integer", "minimum": 1.5}), "field `minimum`: expected an integer, got 1.5"),
        (of({"type": "string", "description": 3}), "field `description`: expected a string"),
        (of({"type": ["object"]}), "field `type`: unknown variant `object`"),
        (of({"anyOf": [{"$ref": "#"}]}), "field `anyOf`: missing field `type`"),
        (of({"anyOf": [{"type": ["null"]}]}), "field `anyOf`: missing field `type`"),
        (of({"type": "null"}, additionalProperties=True), "should not be true"),
        (of({"type": "null"}, required=[]), "must match all properties"),
        (of({"type": "null"}, required=["a", "a"]), "Duplicate required property 'a'"),
        (of({"type": "null"}, required=["b"]), "Required property 'b' not found"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    schema: Any, message: str
) -> None:
    with pytest.raises(ConversionError) as caught:
        PARITY.normalise(schema)
    assert message in caught.value.message


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "required": list(properties),
    }


def test_the_extended_rules_keep_every_keyword_and_close_objects() -> None:
    text = {"type": "string", "minLength": 2, "format": "date", "title": "t"}
    schema = of(
        {"oneOf": [{"$ref": "#/$defs/x"}, {"type": ["object", "null"], "properties": {"b": text}}]},
        minProperties=1,
        **{"$defs": {"x": {"type": "array", "uniqueItems": True, "items": of(text)}}},
    )
    member = closed(b=text) | {"type": ["object", "null"]}
    assert EXTENDED.normalise(schema) == {
        **closed(a={"oneOf": [{"$ref": "#/$defs/x"}, member]}),
        "minProperties": 1,
        "$defs": {"x": {"type": "array", "uniqueItems": True, "items": closed(a=text)}},
    }
    assert "$defs" not in PARITY.normalise(of({"type": "null"}, **{"$defs": {}}))


def test_the_extended_rules_pass_over_null_and_leave_members_of_allof_open() -> None:
    both = {"allOf": [of(INT), {"type": "object", "properties": {"b": INT}}], "pattern": None}
    assert EXTENDED.normalise(of(both))["properties"] == {"a": {"allOf": both["allOf"]}}
    assert EXTENDED.normalise(of({"const": None}))["properties"] == {"a": {"const": None}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{"type": "object"}]}, "The top level of the function parameters schema"),
        (of({"type": "zzz"}), "zzz"),
        (of({"type": "object"}), "An object with no properties is not allowed."),
        (of({"type": "object", "properties": 3}), "field `properties`: expected an object"),
        (of({"type": "integer", "minimum": "x"}), "Invalid tool parameters schema"),
        (of({"type": "null"}, additionalProperties=True), "should not be true"),
        (of({"type": "null"}, required=[]), "must match all properties"),
        (of({"type": "null"}, required="a"), "field `required`: expected a list of strings"),
        (of({"type": "null"}, required=["b"]), "Required property 'b' not found"),
    ],
)
def test_the_extended_rules_refuse_what_is_not_strict(schema: Any, message: str) -> None:
    with pytest.raises(ConversionError) as caught:
        EXTENDED.normalise(schema)
    assert message in caught.value.message
    assert caught.value.param == "p"


@pytest.mark.parametrize("where", ["answer", "tool"])
@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("uniqueItems", {"type": "array", "items": INT, "uniqueItems": True}),
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("minProperties", {**of(INT), "minProperties": 3}),
    ],
)
def test_a_strict_promise_that_cannot_be_kept_is_refused_by_name(
    keyword: str, schema: Any, where: str
) -> None:
    body: dict[str, Any] = {
        "model": "DeepSeek-V4.1-Flash",
        "messages": [{"role": "user", "content": "json"}],
    }
    if where == "tool":
        function = {"name": "f", "parameters": of(schema), "strict": True}
        body["tools"] = [{"type": "function", "function": function}]
    else:
        form = {"name": "x", "schema": of(schema), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    with pytest.raises(GrammarError, match=f"`{keyword}`"):
        request_grammar(Exchange("chat", body).request)
