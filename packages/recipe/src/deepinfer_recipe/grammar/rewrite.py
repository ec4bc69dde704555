"""Schemas rewritten so that the grammar library enforces what they say.

xgrammar reads a schema keyword by keyword and passes over combinations: `allOf` of several
members, `anyOf` beside other keywords, `required` names that are not declared. Those are
rewritten here into schemas that mean the same and that it does enforce. Formats of strings
become patterns, since its own are wider than what validators accept.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from deepinfer_recipe.base.errors import GrammarError

MAX_DEPTH = 64
ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        "contentEncoding",
        "contentMediaType",
        "$comment",
        "$schema",
        "$id",
    )
)
_MAX_PAIRS = 64
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")

_OCTET = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    (
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{1,{n}}}(:{_GROUP}){{1,{7 - n}}}" for n in range(1, 7)),
        f"({_GROUP}:){{1,7}}:",
        f":((:{_GROUP}){{1,7}}|:)",
    )
)
_DAY = (
    r"(\d{4}-(02-(0[1-9]|1\d|2[0-8])|(0[13-9]|1[0-2])-(0[1-9]|[12]\d|30)|(0[13578]|1[02])-31)"
    r"|\d\d(0[48]|[2468][048]|[13579][26])-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,22}[a-zA-Z0-9])?"
FORMATS = {
    "email": rf"[a-zA-Z0-9_]{{1,20}}([.+-][a-zA-Z0-9_]{{1,8}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": f"({_IPV6})",
    "uuid": rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
}
"""The formats that strict mode knows, and dates: of what a format allows the part that every
validator accepts."""


def enforceable(schema: Any, depth: int = 0) -> Any:
    """A schema that allows the same values and whose keywords xgrammar enforces one by one.

    Raises `GrammarError` for keywords that contradict or nest too deeply. Keywords that no
    grammar can count (`uniqueItems`, `contains`, `not`, `if`, ...) stay and are not enforced.
    """
    if depth > MAX_DEPTH:
        raise GrammarError(f"the schema nests deeper than {MAX_DEPTH} levels; make it flatter")
    if not isinstance(schema, dict):
        return schema
    made = flattened(schema)
    if "pattern" not in made and made.get("format") in FORMATS:
        made["pattern"] = FORMATS[made.pop("format")]
    if isinstance(made.get("pattern"), str):
        made["pattern"] = safe_pattern(made["pattern"])
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(made.get(key), dict):
            made[key] = {name: enforceable(one, depth + 1) for name, one in made[key].items()}
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = enforceable(made[key], depth + 1)
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(made.get(key), list):
            made[key] = [enforceable(one, depth + 1) for one in made[key]]
    _declare_required(made)
    return made


_PATTERN_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\)\?(?!\?)", re.DOTALL)


def safe_pattern(pattern: str) -> str:
    """The expression with every optional group counted instead.

    In JSON strings xgrammar 0.2.9 reads `(ab+)?` as if `b+` could come without `a`; `(ab+){0,1}`
    it reads right.
    """
    return _PATTERN_PARTS.sub(lambda m: "){0,1}" if m.group() == ")?" else m.group(), pattern)


def flattened(schema: dict[str, Any]) -> dict[str, Any]:
    """Without `allOf`, and without keywords beside `anyOf` and `oneOf`."""
    made = {key: value for key, value in schema.items() if key != "allOf"}
    for member in schema.get("allOf", ()):
        made = merge(made, flattened(member) if isinstance(member, dict) else member)
    if not isinstance(made, dict):
        return {"enum": []} if made is False else {}
    for key in ("anyOf", "oneOf"):
        members = made.get(key)
        apart = {key, "$defs", "definitions"} | ANNOTATIONS
        beside = {name: value for name, value in made.items() if name not in apart}
        if isinstance(members, list) and beside:
            rest = {name: value for name, value in made.items() if name in apart}
            possible = _possible(beside, members)
            if not possible:
                raise GrammarError(f"none of the schema's `{key}` goes with the keywords beside it")
            made = {**rest, key: possible}
    return made


def _possible(beside: Any, members: list[Any]) -> list[Any]:
    """The alternatives that go with what stands beside them, merged into it."""
    possible: list[Any] = []
    for member in members:
        try:
            possible.append(
                merge(beside, flattened(member) if isinstance(member, dict) else member)
            )
        except GrammarError:  # they contradict: nothing is both
            continue
    return possible


def merge(left: Any, right: Any) -> Any:
    """The schema of what both allow. Raises `GrammarError` where they cannot be combined."""
    if left is True or left == {}:
        return right
    if right is True or right == {}:
        return left
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return False
    out: dict[str, Any] = dict(left)
    for key, value in right.items():
        if key not in out or out[key] == value or key in ANNOTATIONS:
            out[key] = value
        elif key in _COMBINED:
            out[key] = _COMBINED[key](out[key], value)
        else:
            raise GrammarError(
                f"the schema demands two different `{key}` of one value; state one of them"
            )
    return out


def _both_types(left: Any, right: Any) -> Any:
    one, other = ([kind] if isinstance(kind, str) else list(kind) for kind in (left, right))
    kept = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)] + [
        kind for kind in other if kind == "integer" and "number" in one and kind not in one
    ]
    if not kept:
        raise GrammarError(f"the schema demands the types {left!r} and {right!r} of one value")
    return kept[0] if len(kept) == 1 else kept


def _both_properties(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return left | {
        name: merge(left[name], one) if name in left else one for name, one in right.items()
    }


def _both_alternatives(left: list[Any], right: list[Any]) -> list[Any]:
    """Every pair that goes together."""
    if len(left) * len(right) > _MAX_PAIRS:
        raise GrammarError(
            f"the schema combines {len(left)} and {len(right)} alternatives of one value; at most "
            f"{_MAX_PAIRS} pairs are enforced"
        )
    pairs = [one for member in left for one in _possible(member, right)]
    if not pairs:
        raise GrammarError("the schema demands alternatives of one value that contradict")
    return pairs


_COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_LOWER_BOUNDS, max),
    **dict.fromkeys(_UPPER_BOUNDS, min),
    "type": _both_types,
    "anyOf": _both_alternatives,
    "oneOf": _both_alternatives,
    "properties": _both_properties,
    "patternProperties": _both_properties,
    "$defs": _both_properties,
    "definitions": _both_properties,
    "required": lambda left, right: [*left, *(name for name in right if name not in left)],
    "enum": lambda left, right: [value for value in left if value in right],
    "items": merge,
    "additionalProperties": merge,
}


def _declare_required(schema: dict[str, Any]) -> None:
    required = schema.get("required")
    if not isinstance(required, list):
        return
    properties = dict(schema.get("properties") or {})
    rest = schema.get("additionalProperties", True)
    for name in required:
        properties.setdefault(name, rest)
    if properties:
        schema["properties"] = properties
