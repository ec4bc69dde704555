"""Which parts of a grammar may be dear to walk: those are tried out in advance.

What a grammar allows at a place is found when a walk comes there, in the step that needs it. One
place costs about as much as the grammar has places that the walk may be in at the same time: one
or two in the markup of calls and in plain schemas, hundreds where a pattern counts in a pattern or
alternatives look alike. Constants, marks, free text, plain schemas and what this package writes
itself are known to be cheap (at most 45 ms at 129,280 tokens, mostly below one). Anything else is
doubtful.
"""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.grammar.formats import Format
from deepinfer_recipe.grammar.rewrite import FORMATS, MAX_DEPTH, safe_pattern
from deepinfer_recipe.grammar.schema import MAX_LEAST, MAX_UNROLLED, NUMBER

_MAX_ALIKE = 8
"""Alternatives that may begin alike."""
_MAX_OPTIONAL = 40
"""Parts in a row that may be left out: a walk stands before each of them at once."""
_MAX_COUNT = 64
"""Elements of an array that are counted."""
_PLAIN = frozenset(
    (
        *("type", "properties", "required", "additionalProperties", "items", "enum", "const"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems"),
        *("minLength", "maxLength", "anyOf", "oneOf", "pattern", "title", "description", "default"),
    )
)
_OWN_PATTERNS = frozenset(map(safe_pattern, FORMATS.values()))
_OWN_RULE = re.compile(r"root ::= \[\^.\]\{(\d+)(?:,(\d*))?\}")


def doubtful_parts(text: str) -> list[str]:
    """Structural tags, each a part of this one that may be dear; the whole tag may be among them.

    Empty for a text that is no structural tag, which no compiler takes.
    """
    try:
        root = json.loads(text)["format"]
        found = _doubtful(root)
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    except RecursionError:
        return [text]
    tags = (compact_json({"type": "structural_tag", "format": part}) for part in found)
    return list(dict.fromkeys(tags))


def _doubtful(node: Format) -> list[Format]:
    match node["type"]:
        case "const_string" | "token" | "any_text":
            return []
        case "optional" | "plus" | "star":
            return _doubtful(node["content"])
        case "sequence":
            loose = sum(part["type"] in ("optional", "star") for part in node["elements"])
            if loose > _MAX_OPTIONAL:
                return [node]
        case "or":
            if _alike(node["elements"]) > _MAX_ALIKE:
                return [node]
        case "regex":
            return [] if node["pattern"] in _OWN_PATTERNS else [node]
        case "json_schema":
            return [] if _is_plain(node["json_schema"]) else [node]
        case _:
            return [] if _is_own(node) else [node]
    return [found for part in node["elements"] for found in _doubtful(part)]


def _is_own(node: Format) -> bool:
    rules = node.get("grammar")
    if node["type"] != "grammar" or "syntax" in node or not isinstance(rules, str):
        return False
    counted = _OWN_RULE.fullmatch(rules)
    if counted is None:
        return rules == NUMBER
    return max(int(count or 0) for count in counted.groups()) <= max(MAX_LEAST, MAX_UNROLLED)


def _alike(elements: list[Format]) -> int:
    """How many alternatives a walk cannot tell apart by the constants in front."""
    heads = [_head(element) for element in elements]
    free = sum(not head for head in heads)
    return free + sum(bool(head) for head in heads) - len({head for head in heads if head})


def _head(node: Format) -> str:
    text, _ = _leading(node)
    return text


def _leading(node: Format) -> tuple[str, bool]:
    """The constants that a part begins with, and whether it is nothing but constants."""
    match node["type"]:
        case "const_string":
            return node["value"], True
        case "token":
            return f"\0{node['token']}\0", True
        case "sequence":
            text = ""
            for part in node["elements"]:
                more, whole = _leading(part)
                text += more
                if not whole:
                    return text, False
            return text, True
        case _:
            return "", False


def _is_plain(schema: Any, depth: int = 0) -> bool:
    """Whether a schema is one of objects and arrays of simple values, without much choice."""
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict) or depth > MAX_DEPTH or not _PLAIN.issuperset(schema):
        return False
    if "pattern" in schema and schema["pattern"] not in _OWN_PATTERNS:
        return False
    counts = [schema[key] for key in ("minItems", "maxItems") if key in schema]
    properties = schema.get("properties", {})
    members = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if max(counts, default=0) > _MAX_COUNT or len(properties) > _MAX_OPTIONAL:
        return False
    if len(members) > _MAX_ALIKE:
        return False
    inner = [*properties.values(), *members]
    inner += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return all(_is_plain(one, depth + 1) for one in inner)
