"""Constructors of structural tags, the JSON language that grammars are written in here.

A structural tag is plain data: it can be made without xgrammar, logged, cached and sent to
another process as text. `Format` is one node of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Format: TypeAlias = dict[str, Any]


def const(text: str) -> Format:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def token(spelling: str) -> Format:
    """Exactly this special token: neither ordinary tokens that spell it nor another one."""
    return {"type": "token", "token": spelling}


def any_text(*excluded: str, max_chars: int | None = None) -> Format:
    """Any text in which none of these occurs; may be empty.

    max_chars: most code points. Held where each excluded text is one character: behind the
    beginning of a longer one the library lets the bound go. At the bound itself a character whose
    bytes are two tokens is cut behind the first.
    """
    bound = {} if max_chars is None else {"max_chars": max_chars}
    return {"type": "any_text", "excludes": list(excluded), **bound}


def regex(pattern: str) -> Format:
    """Text that the whole pattern matches."""
    return {"type": "regex", "pattern": pattern}


def ebnf(rules: str) -> Format:
    """A grammar in GBNF whose first rule is `root`."""
    return {"type": "grammar", "grammar": rules}


def lark(rules: str) -> Format:
    """A grammar in Lark's syntax whose first rule is `start`."""
    return {"type": "grammar", "grammar": rules, "syntax": "lark"}


def json_schema(schema: Any, *, excluded: Sequence[str], max_whitespace: int) -> Format:
    """JSON that the schema allows, with at most `max_whitespace` blanks in a row.

    excluded: texts that must not occur inside its strings.
    """
    return {
        "type": "json_schema",
        "json_schema": schema,
        "excludes": list(excluded),
        "max_whitespace_cnt": max_whitespace,
    }


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of these."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    """This or nothing."""
    return {"type": "optional", "content": content}


def one_or_more(content: Format) -> Format:
    """This, any number of times, at least once."""
    return {"type": "plus", "content": content}


def any_number(content: Format) -> Format:
    """This, any number of times or not at all."""
    return {"type": "star", "content": content}
