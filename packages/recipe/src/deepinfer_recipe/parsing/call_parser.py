"""The states inside a block of tool calls as the reference knows them.

Both spellings of the tags (V4 and V4.1) are understood. Arguments come out as JSON text:
string values are escaped and handed on as they arrive; other values are copied. A key is
escaped, whatever it contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from deepinfer_recipe.base.json_closing import closing_of
from deepinfer_recipe.base.json_text import quote
from deepinfer_recipe.parsing.output_sink import OutputSink
from deepinfer_recipe.parsing.partial_match import ValuePath, alternation, patterns_of

_HEADER = re.compile(r'"(.*?)"(?: [^>"]*"(true|false)"[^>]*)?>', re.DOTALL)
_MAX_HEADER_CHARS = 4096
_INVOKE = 'invoke name="'
_PARAMETER = "parameter name="


class CallParser:
    """Parses the inside of a block of tool calls as the reference does, losses included."""

    def __init__(self, dsml: str, sink: OutputSink) -> None:
        self._sink = sink
        self._close = f"</{dsml}"
        closers = [f"{self._close}{tag}>" for tag in ("tool_calls", " calls")]
        self._block_marks = alternation(_INVOKE, *closers)
        self._block_hold = max(map(len, closers)) - 1
        argument_marks = [_PARAMETER, self._close]
        self._argument_marks = alternation(*argument_marks)
        self._argument_hold = max(map(len, argument_marks)) - 1
        self._value_patterns = patterns_of(self._close)
        self._state: Callable[[str], str | None] = self._block
        self._held = ""
        self._name_parts: list[str] = []
        self._parameters = 0
        self._in_call = False
        self._is_string = False
        self._value: list[str] = []
        self._left_block = False
        self.repairs: list[str] = []

    @property
    def is_inside(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._in_call

    def value_path(self) -> ValuePath | None:
        """How plain text of the current string value passes, where one is being read."""
        if self._state != self._value_text or not self._is_string:
            return None
        patterns = self._value_patterns
        return patterns.has_first, patterns.is_plain, self._emit_value

    def feed(self, text: str) -> tuple[str | None, str]:
        """Take text; returns `(text behind the block, "")` or `(None, text held back)`."""
        rest: str | None = text
        self._held = ""
        self._left_block = False
        while rest:
            rest = self._state(rest)
            if self._left_block:
                return rest or "", ""
        return None, self._held

    def _block(self, text: str) -> str | None:
        mark = self._block_marks.search(text)
        if mark is None:
            self._held = text[-self._block_hold :]
            return None
        if mark.group() == _INVOKE:
            self._state = self._name
        else:
            self._left_block = True
        return text[mark.end() :]

    def _name(self, text: str) -> str | None:
        end = text.find('"')
        self._name_parts.append(text if end < 0 else text[:end])
        if end < 0:
            return None
        self._in_call = True
        self._parameters = 0
        self._sink.call_started("".join(self._name_parts))
        self._name_parts.clear()
        self._state = self._arguments
        return text[end + 1 :]

    def _arguments(self, text: str) -> str | None:
        mark = self._argument_marks.search(text)
        if mark is None:
            self._held = text[-self._argument_hold :]
            return None
        if mark.group() == _PARAMETER:
            self._state = self._header
        else:
            self._end_call()
            self._state = self._block
        return text[mark.end() :]

    def _end_call(self) -> None:
        self._sink.call_arguments("}" if self._parameters else "{}")
        self._in_call = False
        self._sink.call_ended()

    def _header(self, text: str) -> str | None:
        found = _HEADER.match(text)
        broken = text.find(self._close, 0, found.end() if found else len(text))
        if broken >= 0 or (found is None and len(text) > _MAX_HEADER_CHARS):
            self.repairs.append("a parameter whose tag was never completed was dropped")
            self._state = self._arguments
            return text[broken + len(self._close) :] if broken >= 0 else ""
        if found is None:
            self._held = text
            return None
        key, flag = found.groups()
        self._is_string = flag != "false"
        if flag is None:
            self.repairs.append(f"parameter {key!r} did not say whether it is a string")
        sink = self._sink
        sink.call_arguments(", " if self._parameters else "{")
        sink.call_arguments(quote(key))
        sink.call_arguments(": ")
        self._parameters += 1
        self._value.clear()
        if self._is_string:
            sink.call_arguments('"')
        self._state = self._value_text
        return text[found.end() :]

    def _value_text(self, text: str) -> str | None:
        end = text.find(self._close)
        if end < 0:
            sure = len(text) - self._value_patterns.held(text)
            self._emit_value(text[:sure])
            self._held = text[sure:]
            return None
        self._emit_value(text[:end])
        if self._is_string:
            self._sink.call_arguments('"')
        self._state = self._arguments
        return text[end + len(self._close) :]

    def _emit_value(self, text: str) -> None:
        if not text:
            return
        if self._is_string:
            self._sink.call_arguments(quote(text)[1:-1], text)
            return
        self._value.append(text)
        self._sink.call_arguments(text)

    def finish(self, held: str, *, mends: bool) -> None:
        """The answer ended inside a call. `mends` makes its arguments a JSON object."""
        if self._state == self._value_text:
            if mends:
                # What is held, newlines aside, may be the beginning of the closing tag.
                self._emit_value(held[: len(held) - len(held.lstrip("\n"))])
                self._close_value()
            else:
                self._emit_value(held)
        elif self._state == self._header and not mends:
            self._cut_header(held)
        if mends:
            self.repairs.append("a call cut short was closed")
            self._end_call()

    def _close_value(self) -> None:
        text = "".join(self._value)
        if self._is_string:
            self._sink.call_arguments('"')
        elif closing := closing_of(text):
            self._sink.call_arguments(closing)

    def _cut_header(self, held: str) -> None:
        """Leave a call cut inside a parameter's tag as it is: its key, as far as known."""
        self._sink.call_arguments(", " if self._parameters else "{")
        key, space, _ = held.partition(" ")
        if key:
            self._sink.call_arguments(key)
        if space:
            self._sink.call_arguments(": ")
