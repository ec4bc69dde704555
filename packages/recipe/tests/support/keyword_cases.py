"""Each keyword of JSON Schema 2020-12, with schemas and values that tell whether it is held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Verdict: TypeAlias = Literal["held", "refused", "silent"]
VOCABULARIES: dict[str, tuple[str, ...]] = {
    "core": (
        *("$schema", "$vocabulary", "$id", "$anchor", "$dynamicAnchor"),
        *("$ref", "$dynamicRef", "$defs", "$comment"),
    ),
    "applicator": (
        *("prefixItems", "items", "contains", "additionalProperties", "properties"),
        *("patternProperties", "dependentSchemas", "propertyNames", "if", "then", "else"),
        *("allOf", "anyOf", "oneOf", "not"),
    ),
    "unevaluated": ("unevaluatedItems", "unevaluatedProperties"),
    "validation": (
        *("type", "const", "enum", "multipleOf", "maximum", "exclusiveMaximum", "minimum"),
        *("exclusiveMinimum", "maxLength", "minLength", "pattern", "maxItems", "minItems"),
        *("uniqueItems", "maxContains", "minContains", "maxProperties", "minProperties"),
        *("required", "dependentRequired"),
    ),
    "format": ("format",),
    "content": ("contentEncoding", "contentMediaType", "contentSchema"),
    "meta-data": (
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples"),
    ),
    "older drafts": ("definitions", "dependencies", "additionalItems"),
}


@dataclass(frozen=True)
class Case:
    """A schema with this keyword, values it allows (`good`) and others (`bad`).

    verdict: `held` (no grammar lets a bad value through), `refused` (there is no grammar, the
    error names the keyword) or `silent` (the standard makes it say nothing about values).
    when: the condition under which that is so, empty where there is none.
    """

    keyword: str
    verdict: Verdict
    schema: Any
    good: Sequence[Any]
    bad: Sequence[Any] = ()
    when: str = ""


def _object(**more: Any) -> dict[str, Any]:
    return {"type": "object", **more}


INT: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
LIST: dict[str, Any] = {"type": "array", "items": INT}
CLOSED: dict[str, Any] = _object(properties={"k": INT, "m": INT}, additionalProperties=False)
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def held(
    keyword: str, schema: Any, good: Sequence[Any], bad: Sequence[Any], when: str = ""
) -> Case:
    return Case(keyword, "held", schema, good, bad, when)


def refused(
    keyword: str, schema: Any, good: Sequence[Any], bad: Sequence[Any], when: str = ""
) -> Case:
    return Case(keyword, "refused", schema, good, bad, when)


def silent(keyword: str, schema: Any, good: Sequence[Any], when: str = "") -> Case:
    return Case(keyword, "silent", schema, good, (), when)


NAMED = "for the names of the standard"
BY_ITSELF = "if it holds by itself"
CASES: tuple[Case, ...] = (
    # core
    silent("$schema", {"$schema": "https://json-schema.org/draft/2020-12/schema", **INT}, [1]),
    silent("$vocabulary", {"$vocabulary": {"https://a.b/c": True}, **INT}, [1]),
    silent("$id", {"$id": "https://a.b/root", **INT}, [1], "at the root"),
    refused(
        "$id",
        {"anyOf": [{"$id": "https://a.b/c", "type": "integer"}, {"type": "null"}]},
        [1, None],
        ["a"],
    ),
    silent("$anchor", {"$anchor": "here", **INT}, [1]),
    silent("$dynamicAnchor", {"$dynamicAnchor": "here", **INT}, [1]),
    held(
        "$ref", {"$ref": "#/$defs/n", "$defs": {"n": INT}}, [1], ["a", None], "inside the document"
    ),
    refused("$ref", {"$ref": "#n", "$defs": {"n": {"$anchor": "n", **INT}}}, [1], ["a"]),
    refused(
        "$dynamicRef",
        {"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", **INT}}},
        [1],
        ["a"],
    ),
    held("$defs", {"$ref": "#/$defs/n", "$defs": {"n": INT}}, [1], ["a"]),
    silent("$comment", {"$comment": "c", **INT}, [1]),
    # applicator
    held(
        "prefixItems",
        {"type": "array", "prefixItems": [INT, TEXT], "minItems": 2, "items": False},
        [[1, "a"]],
        [["a", 1], [1], [1, "a", 2]],
    ),
    held("items", LIST, [[], [1, 2]], [["a"], [1, None]]),
    refused("contains", {"type": "array", "contains": INT}, [["a", 1]], [["a"]]),
    held(
        "additionalProperties",
        _object(properties={"k": INT}, additionalProperties=False),
        [{}, {"k": 1}],
        [{"k": 1, "z": 1}],
    ),
    held("additionalProperties", _object(additionalProperties=INT), [{"z": 1}], [{"z": "a"}]),
    held("properties", _object(properties={"k": INT}), [{"k": 1}], [{"k": "a"}]),
    held(
        "patternProperties",
        _object(patternProperties={"^a[0-9]$": INT}, additionalProperties=False),
        [{"a1": 1}],
        [{"a1": "x"}, {"b1": 1}],
    ),
    refused(
        "dependentSchemas",
        {**CLOSED, "dependentSchemas": {"k": {"required": ["m"]}}},
        [{"k": 1, "m": 1}],
        [{"k": 1}],
    ),
    refused("propertyNames", _object(propertyNames={"pattern": "^a"}), [{"a": 1}], [{"b": 1}]),
    silent("if", {**TEXT, "if": {"minLength": 2}}, ["a", "aa"], "without `then` and `else`"),
    refused("if", {**TEXT, "if": {"minLength": 2}, "then": {"maxLength": 3}}, ["a"], ["aaaa"]),
    silent("then", {**TEXT, "then": {"maxLength": 1}}, ["a", "aa"], "without `if`"),
    silent("else", {**TEXT, "else": {"maxLength": 1}}, ["a", "aa"], "without `if`"),
    held("allOf", {"allOf": [INT, {"minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10, "a"]),
    held("anyOf", {"anyOf": [{"type": "integer", "maximum": 3}, TEXT]}, [3, "a"], [4, None]),
    held("oneOf", {"oneOf": [INT, TEXT]}, [1, "a"], [None], "if no value can fit two"),
    refused("oneOf", {"oneOf": [INT, {"type": "number", "minimum": 5}]}, [1, 5.5], [6]),
    refused("not", {**TEXT, "not": {"const": "a"}}, ["b"], ["a"]),
    # unevaluated
    refused(
        "unevaluatedItems",
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        [[1]],
        [[1, 2]],
    ),
    refused(
        "unevaluatedProperties",
        _object(properties={"k": INT}, unevaluatedProperties=False),
        [{"k": 1}],
        [{"k": 1, "z": 1}],
    ),
    # validation
    held("type", INT, [1, -20], ["a", 1.5, None, [], {}, True]),
    held("type", {"type": ["boolean", "null"]}, [True, None], ["a", 1]),
    held("const", {"const": "only"}, ["only"], ["other", 1]),
    held("const", {"const": {"k": [1]}}, [{"k": [1]}], [{"k": [2]}, "a"]),
    held("enum", {"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    held("multipleOf", {"type": "integer", "multipleOf": 1}, [3], ["a", 1.5], BY_ITSELF),
    refused("multipleOf", {"type": "integer", "multipleOf": 3}, [3], [4]),
    held("maximum", {"type": "integer", "maximum": 9}, [9, -3], [10, 100]),
    held("maximum", {"type": "number", "maximum": 2.5}, [2.5, -1], [2.6, 3]),
    held("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 9}, [8], [9, 10]),
    held("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 2.5}, [2.4], [2.5, 3]),
    held("minimum", {"type": "integer", "minimum": -3}, [-3, 40], [-4, -30]),
    held("minimum", {"type": "number", "minimum": 0.5}, [0.5, 7], [0.4, -1]),
    held("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3, 0]),
    held("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0.5}, [0.6], [0.5, 0]),
    held("maxLength", {**TEXT, "maxLength": 300}, ["", "é" * 299 + "a"], ["é" * 301, "a" * 301]),
    held("minLength", {**TEXT, "minLength": 3}, ["日本語", "a" * 90], ["", "日本"]),
    held("pattern", {**TEXT, "pattern": "^[a-c]{2}$"}, ["ab"], ["a", "abc", "xy"]),
    refused(
        "minLength",
        {**TEXT, "pattern": "^[a-z]+$", "minLength": 2},
        ["ab"],
        ["a"],
        "beside a `pattern` or `format` that does not keep it",
    ),
    refused(
        "maxLength",
        {**TEXT, "pattern": "^[a-z]+$", "maxLength": 2},
        ["ab"],
        ["abc"],
        "beside a `pattern` or `format` that does not keep it",
    ),
    held("maxItems", {**LIST, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    held("minItems", {**LIST, "minItems": 2}, [[1, 2]], [[], [1]]),
    held("uniqueItems", {**LIST, "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]], BY_ITSELF),
    refused("uniqueItems", {**LIST, "uniqueItems": True}, [[1, 2]], [[1, 1]]),
    refused("maxContains", {**LIST, "contains": INT, "maxContains": 1}, [[1]], [[1, 2]]),
    refused("minContains", {**LIST, "contains": INT, "minContains": 2}, [[1, 2]], [[1]]),
    held("maxProperties", {**CLOSED, "maxProperties": 2}, [{"k": 1}], [{"z": 1}], BY_ITSELF),
    refused("maxProperties", {**CLOSED, "maxProperties": 1}, [{"k": 1}], [{"k": 1, "m": 1}]),
    held(
        "minProperties",
        {**CLOSED, "required": ["k"], "minProperties": 1},
        [{"k": 1}],
        [{}, {"m": 1}],
        BY_ITSELF,
    ),
    refused("minProperties", {**CLOSED, "minProperties": 1}, [{"k": 1}], [{}]),
    held("required", {**CLOSED, "required": ["m"]}, [{"m": 1}], [{}, {"k": 1}]),
    refused(
        "dependentRequired",
        {**CLOSED, "dependentRequired": {"k": ["m"]}},
        [{"k": 1, "m": 1}],
        [{"k": 1}],
    ),
    # format
    held("format", {**TEXT, "format": "date"}, ["2024-02-29"], ["2023-02-29", "soon"], NAMED),
    held("format", {**TEXT, "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"], NAMED),
    held(
        "format",
        {**TEXT, "format": "uuid"},
        ["00000000-0000-4000-8000-00000000000f"],
        ["00000000-0000-4000-8000-00000000000g"],
        NAMED,
    ),
    held("format", {**TEXT, "format": "email"}, ["a@b.org"], ["a.b.org"], NAMED),
    silent("format", {**TEXT, "format": "wizardry"}, ["a"], "with any other name"),
    # content, meta-data
    silent("contentEncoding", {**TEXT, "contentEncoding": "base64"}, ["YQ==", "no"]),
    silent("contentMediaType", {**TEXT, "contentMediaType": "text/html"}, ["<p>"]),
    silent("contentSchema", {**TEXT, "contentSchema": INT}, ["1", "a"]),
    silent("title", {**INT, "title": "t"}, [1]),
    silent("description", {**INT, "description": "d"}, [1]),
    silent("default", {**INT, "default": 5}, [1, 5]),
    silent("deprecated", {**INT, "deprecated": True}, [1]),
    silent("readOnly", {**INT, "readOnly": True}, [1]),
    silent("writeOnly", {**INT, "writeOnly": True}, [1]),
    silent("examples", {**INT, "examples": [5]}, [1, 5]),
    # older drafts
    held("definitions", {"$ref": "#/definitions/n", "definitions": {"n": INT}}, [1], ["a"]),
    refused(
        "dependencies",
        {**CLOSED, "$schema": DRAFT_7, "dependencies": {"k": ["m"]}},
        [{"k": 1, "m": 1}],
        [{"k": 1}],
    ),
    refused(
        "additionalItems",
        {"$schema": DRAFT_7, "type": "array", "items": [INT], "additionalItems": False},
        [[1]],
        [[1, 2]],
    ),
    refused(
        "items",
        {"$schema": DRAFT_7, "type": "array", "items": [INT], "minItems": 1},
        [[1, "a"]],
        [["a"]],
        "as the list of drafts before 2020-12",
    ),
)
