"""The arguments of one call on their way out: pieces of JSON text, and what had to be mended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from deepinfer_recipe.base.json_closing import closing_of
from deepinfer_recipe.base.json_text import loads, quote, saturated
from deepinfer_recipe.parsing.output_sink import OutputSink

_WRAPPERS = frozenset(("arguments", "parameters", "params", "args", "kwargs", "input"))
"""Names under which models put all arguments at once as one JSON object."""


class Arguments:
    """Writes the arguments of a call to the sink, as they come.

    declared: the parameters that the tool has, None where that is not known. spell: makes text
        to be shown of text as it was read.
    """

    def __init__(
        self,
        sink: OutputSink,
        repairs: list[str],
        declared: frozenset[str] | None,
        spell: Callable[[str], str],
    ) -> None:
        self._spell = spell
        self._sink = sink
        self._repairs = repairs
        self._declared = declared
        self._keys: set[str] = set()
        self._has_duplicates = False
        self._whole: list[str] = []
        """Everything written, for a call whose keys turn out to repeat."""
        self._value: list[str] = []
        self._is_string = False
        self._wraps = False
        """Whether the value being read may be an object of all arguments: it waits."""
        self._waiting: tuple[str, bool, str] | None = None

    def begin(self, key: str, *, is_string: bool) -> None:
        """A parameter begins."""
        self._release()
        self._is_string = is_string
        self._value.clear()
        self._wraps = not self._keys and self._may_wrap(key)
        if self._wraps:
            self._waiting = (key, is_string, "")
        else:
            self._open(key)

    def _may_wrap(self, key: str) -> bool:
        if self._declared is None:
            return key in ("arguments", "parameters")
        return key in _WRAPPERS and key not in self._declared

    def _open(self, key: str) -> None:
        self._write(", " if self._keys else "{")
        if key in self._keys:
            self._has_duplicates = True
            self._repairs.append(f"parameter {key!r} came twice: the last value holds")
        self._keys.add(key)
        self._write(quote(key))
        self._write(": ")
        if self._is_string:
            self._write('"')

    def _write(self, piece: str, raw: str | None = None) -> None:
        self._whole.append(piece)
        self._sink.call_arguments(piece, raw)

    def more(self, text: str) -> None:
        """More of the value."""
        if not text:
            return
        if self._is_string and not self._wraps:
            piece = quote(self._spell(text))[1:-1]
            self._whole.append(piece)
            self._sink.call_arguments(piece, text)
        else:
            # A value that is no string is handed on once it is known to be JSON.
            self._value.append(text)

    def end_value(self, *, is_cut: bool = False) -> None:
        """The value is complete; `is_cut` closes what was cut short."""
        text = self._spell("".join(self._value))
        if self._wraps:
            key, is_string, _ = self._waiting or ("", True, "")
            self._waiting = (key, is_string, text if is_string or not is_cut else _closed(text))
            self._wraps = False
        elif self._is_string:
            self._write('"')
        else:
            self._write(self._as_json(_closed(text) if is_cut else text), None)

    def _release(self) -> None:
        """What waited was an ordinary parameter."""
        if self._waiting is None:
            return
        key, self._is_string, text = self._waiting
        self._waiting = None
        self._open(key)
        if self._is_string:
            self._write(quote(text)[1:-1], text)
            self._write('"')
        else:
            self._write(self._as_json(text))

    def end(self, loose: str) -> str | None:
        """The call is complete. `loose` is what stood between its tags.

        Returns the arguments as they are meant where that differs from what was written.
        """
        wrapped = loose if not self._keys and self._waiting is None else None
        if self._waiting is not None:
            wrapped = self._waiting[2]
        inner = None if wrapped is None else _object(wrapped)
        if inner is not None:
            what = "given as one JSON object" if self._waiting is None else "wrapped in a parameter"
            self._repairs.append(f"arguments {what} were taken out of it")
            self._waiting = None
            self._write(json.dumps(inner, ensure_ascii=False))
            return None
        self._release()
        self._write("}" if self._keys else "{}")
        if not self._has_duplicates:
            return None
        return json.dumps(loads("".join(self._whole)), ensure_ascii=False)

    @property
    def streams(self) -> bool:
        """Whether the text of the current value is handed on as it comes."""
        return self._is_string and not self._wraps

    @property
    def takes_loose(self) -> bool:
        """Whether text between the tags may be the arguments themselves."""
        return not self._keys and self._waiting is None

    def _as_json(self, text: str) -> str:
        if _is_json(text):
            return text
        # Numbers without bound are JSON, but readers refuse them, our own next turn included.
        bounded = saturated(text)
        if _is_json(bounded):
            self._repairs.append("a number beyond a double became the largest one")
            return bounded
        self._repairs.append("a value that is not JSON became a string")
        return quote(text)


def _closed(text: str) -> str:
    return text + closing_of(text)


def _object(text: str) -> dict[str, Any] | None:
    """The object that a text is, if it is one that says something."""
    if "{" not in text:
        return None
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value else None


def _is_json(text: str) -> bool:
    try:
        loads(text)
    except ValueError:
        return False
    return True
