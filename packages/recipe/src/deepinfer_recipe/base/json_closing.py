"""Completing JSON text that was cut short."""

from __future__ import annotations

import re

_STRING_PIECE = re.compile(r'[^"\\]+|\\u[0-9a-fA-F]{4}|\\[^u]')
_LITERALS = ("true", "false", "null")
_TOKEN = re.compile(r'[{}\[\],:"]|[^\s{}\[\],:"]+')


def _close_string(text: str, position: int) -> tuple[int, str] | None:
    """Read a string body from `position`: where it ends, or None and how to close it."""
    while position < len(text):
        if text[position] == '"':
            return position + 1, ""
        piece = _STRING_PIECE.match(text, position)
        if piece is None:
            break
        position = piece.end()
    rest = text[position:]
    if rest == "\\":
        return len(text), '\\"'
    if rest.startswith("\\u"):
        return len(text), "0" * (6 - len(rest)) + '"'
    return len(text), '"'


def _complete_scalar(token: str) -> str:
    for literal in _LITERALS:
        if literal.startswith(token):
            return literal[len(token) :]
    return "0" if token[-1] in "+-.eE" else ""


def closing_of(text: str) -> str:
    """What to append to `text`, the beginning of a JSON value, to make it a whole value.

    For text that begins no JSON value the result is not valid JSON either.
    """
    stack: list[str] = []
    wants = "value"
    position = 0
    suffix = ""
    while found := _TOKEN.search(text, position):
        token, position = found.group(), found.end()
        is_key = wants == "key"
        if token == '"':
            end = _close_string(text, position)
            position, suffix = end if end else (len(text), '"')
            wants = "colon" if is_key else "comma"
        elif token in "{[":
            stack.append("}" if token == "{" else "]")
            wants = "key" if token == "{" else "value?"
        elif token in "}]":
            if stack:
                stack.pop()
            wants = "comma"
        elif token == ",":
            wants = "key" if stack and stack[-1] == "}" else "value"
        elif token == ":":
            wants = "value"
        else:
            suffix = _complete_scalar(token) if position == len(text) else ""
            wants = "comma"
    if wants == "colon":
        suffix += ": null"
    elif wants == "value" or (wants == "key" and text.rstrip().endswith(",")):
        suffix += '"": null' if wants == "key" else "null"
    return suffix + "".join(reversed(stack))
