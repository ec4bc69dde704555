"""The plain input of a custom tool, out of the JSON arguments that the model wrote for it.

A custom tool is shown to the model as a function with one string parameter `input`. Its call is
reported as the decoded value of that parameter. Arguments that begin in another way are reported
as they are: the caller can still see what the model wanted.
"""

from __future__ import annotations

import re

from deepinfer_recipe.base.json_text import loads

_HEAD = '{"input": "'
# Text of a JSON string, whole escapes only: a high surrogate waits for its other half.
_PLAIN = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


class CustomInput:
    """Feed it the pieces of the arguments in order; it returns what to hand on."""

    __slots__ = ("_held", "_is_head", "_is_over", "_is_raw")

    def __init__(self) -> None:
        self._held = ""
        self._is_head = True
        self._is_raw = False
        self._is_over = False

    def feed(self, piece: str, raw: str | None) -> str:
        """`piece` is JSON text; `raw` the same, decoded, where it lies inside a string value."""
        if self._is_raw:
            return piece
        if self._is_over:
            return ""
        if not self._is_head:
            return self._decoded(piece) if raw is None else raw
        self._held += piece
        if self._held.startswith(_HEAD):
            self._is_head = False
            rest, self._held = self._held[len(_HEAD) :], ""
            return self._decoded(rest)
        if _HEAD.startswith(self._held):
            return ""
        self._is_raw = True
        return self._held

    def _decoded(self, piece: str) -> str:
        text = self._held + piece
        found = _PLAIN.match(text)
        end = found.end() if found else 0
        self._held = text[end:]
        self._is_over = self._held.startswith('"')
        return loads(f'"{text[:end]}"') if end else ""
