"""The states inside a block of tool calls: names, parameters, values.

Both spellings of the tags (V4 and V4.1) are understood. Arguments come out as JSON text:
string values are escaped and handed on as they arrive; other values are copied. A key is
escaped, whatever it contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from deepinfer_recipe.base.json_closing import closing_of
from deepinfer_recipe.base.json_text import loads, quote, saturated
from deepinfer_recipe.parsing.output_sink import OutputSink
from deepinfer_recipe.parsing.partial_match import alternation, patterns_of

_HEADER = re.compile(r'"(.*?)"(?: [^>"]*"(true|false)"[^>]*)?>', re.DOTALL)
_MAX_HEADER_CHARS = 4096
_INVOKE = 'invoke name="'
_PARAMETER = "parameter name="


class CallParser:
    """Parses the inside of one or more blocks of tool calls.

    recovers: also mend what the format forbids: a tag that was not closed is closed by the
        next one, a value that is not JSON becomes a string.
    """

    def __init__(self, dsml: str, sink: OutputSink, *, recovers: bool) -> None:
        self._sink = sink
        self._recovers = recovers
        self._close = f"</{dsml}"
        self._tag_open = f"<{dsml}"
        closers = [f"{self._close}{tag}>" for tag in ("tool_calls", " calls")]
        self._block_marks = alternation(_INVOKE, *closers)
        self._block_hold = max(map(len, closers)) - 1
        argument_marks = [_PARAMETER, self._close, *([_INVOKE] if recovers else [])]
        self._argument_marks = alternation(*argument_marks)
        self._argument_hold = max(map(len, argument_marks)) - 1
        value_ends = [self._close, *([self._tag_open] if recovers else [])]
        self._value_marks = alternation(*value_ends)
        self._value_patterns = patterns_of(*value_ends)
        self._state: Callable[[str], str | None] = self._block
        self._held = ""
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
        if end < 0:
            self._held = text
            return None
        self._in_call = True
        self._parameters = 0
        self._sink.call_started(text[:end])
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
            if mark.group() == _INVOKE:
                self.repairs.append("a call that was not closed ended where the next began")
            self._end_call()
            self._state = self._name if mark.group() == _INVOKE else self._call_closed
        return text[mark.end() :]

    def _call_closed(self, text: str) -> str | None:
        """Behind `</` DSML that ended a call; when recovering it may have closed the block."""
        self._state = self._block
        if not self._recovers:
            return text
        for tag in ("tool_calls>", " calls>"):
            if text.startswith(tag):
                self._left_block = True
                return text[len(tag) :]
            if tag.startswith(text):
                self._held = text
                self._state = self._call_closed
                return None
        return text

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
        mark = self._value_marks.search(text)
        if mark is None:
            sure = len(text) - self._value_patterns.held(text)
            sure -= self._line_ends(text[:sure])
            self._emit_value(text[:sure])
            self._held = text[sure:]
            return None
        value = text[: mark.start()]
        if mark.group() != self._close:
            self.repairs.append("a parameter that was not closed ended where the next tag began")
            value = value[: len(value) - self._line_ends(value)]
        self._emit_value(value)
        self._end_value()
        self._state = self._value_closed if mark.group() == self._close else self._arguments
        return text[mark.end() :]

    def _line_ends(self, value: str) -> int:
        """How many newlines at the end belong to the next tag if the value turns out unclosed."""
        if not self._recovers or not value.endswith("\n"):
            return 0
        return 2 if value.endswith("\n\n") else 1

    def _value_closed(self, text: str) -> str | None:
        """Behind `</` DSML that ended a value; when recovering it may have closed the call."""
        self._state = self._arguments
        if not self._recovers:
            return text
        tags = (" invoke>", "invoke>", " calls>", "tool_calls>")
        for tag in tags:
            if text.startswith(tag):
                self.repairs.append("a parameter that was not closed ended with its call")
                self._end_call()
                self._state = self._block
                self._left_block = "calls" in tag
                return text[len(tag) :]
        if any(tag.startswith(text) for tag in tags):
            self._held = text
            self._state = self._value_closed
            return None
        return text

    def _emit_value(self, text: str) -> None:
        if not text:
            return
        if self._is_string:
            self._sink.call_arguments(quote(text)[1:-1], text)
            return
        self._value.append(text)
        # When recovering, a value is handed on only once it is known to be JSON.
        if not self._recovers:
            self._sink.call_arguments(text)

    def _end_value(self) -> None:
        if self._is_string:
            self._sink.call_arguments('"')
        elif self._recovers:
            self._sink.call_arguments(self._as_json("".join(self._value)))

    def _as_json(self, text: str) -> str:
        if _is_json(text):
            return text
        # Numbers without bound are JSON, but readers refuse them, our own next turn included.
        bounded = saturated(text)
        if _is_json(bounded):
            self.repairs.append("a number beyond a double became the largest one")
            return bounded
        self.repairs.append("a value that is not JSON became a string")
        return quote(text)

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
        elif self._recovers:
            closed = text + closing_of(text)
            self._sink.call_arguments(self._as_json(closed))
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


def _is_json(text: str) -> bool:
    try:
        loads(text)
    except ValueError:
        return False
    return True
