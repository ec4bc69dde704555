"""Recognising schemas that are certainly valid, as most of those of tools are.

Building a validator is the dearest step of accepting a new tool. A schema that uses only the
keywords below, each with a value its metaschema (draft 2020-12, the default) allows, needs none:
no reference has to resolve and no pattern has to compile. Anything else is left to the validator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_MAX_DEPTH = 64


def _is_text(value: Any, depth: int) -> bool:
    return type(value) is str


def _is_flag(value: Any, depth: int) -> bool:
    return type(value) is bool


def _is_number(value: Any, depth: int) -> bool:
    return type(value) is int or type(value) is float


def _is_count(value: Any, depth: int) -> bool:
    return type(value) is int and value >= 0


def _is_anything(value: Any, depth: int) -> bool:
    return True


def _is_list(value: Any, depth: int) -> bool:
    return type(value) is list


def _is_set_of_names(value: Any, depth: int) -> bool:
    if type(value) is not list:
        return False
    for name in value:
        if type(name) is not str:
            return False
    return len(set(value)) == len(value)


def _is_type(value: Any, depth: int) -> bool:
    if type(value) is str:
        return value in _TYPES
    return bool(value) and _is_set_of_names(value, depth) and _TYPES.issuperset(value)


def _are_members(value: Any, depth: int) -> bool:
    return type(value) is dict and _are_choices([*value.values(), True], depth)


def _are_choices(value: Any, depth: int) -> bool:
    # Not `all`: its generator would double the time.
    if type(value) is list and value:
        for member in value:
            if not is_plain_schema(member, depth):
                break
        else:
            return True
    return False


def is_plain_schema(schema: Any, depth: int = 0) -> bool:
    """Whether `schema` is certainly a valid JSON Schema without references; False is no verdict."""
    if type(schema) is bool:
        return True
    if type(schema) is not dict or depth > _MAX_DEPTH:
        return False
    for keyword, value in schema.items():
        check = _KEYWORDS.get(keyword)
        if check is None or not check(value, depth + 1):
            return False
    return True


_KEYWORDS: dict[str, Callable[[Any, int], bool]] = {
    "type": _is_type,
    "description": _is_text,
    "title": _is_text,
    "properties": _are_members,
    "required": _is_set_of_names,
    "additionalProperties": is_plain_schema,
    "items": is_plain_schema,
    "enum": _is_list,
    "const": _is_anything,
    "default": _is_anything,
    "examples": _is_list,
    "anyOf": _are_choices,
    "oneOf": _are_choices,
    "allOf": _are_choices,
    "minimum": _is_number,
    "maximum": _is_number,
    "exclusiveMinimum": _is_number,
    "exclusiveMaximum": _is_number,
    "minLength": _is_count,
    "maxLength": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "uniqueItems": _is_flag,
}
