"""Tool calls that models write as JSON: between tags, behind a mark, or as the bare answer.

A call that begins in the usual way is handed on while it comes (`call_stream`), another when its
JSON is complete; either way its arguments are a JSON object. What turns out to be no call is handed
back as text of the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer_recipe.base.json_closing import closing_of
from deepinfer_recipe.base.json_text import loads
from deepinfer_recipe.parsing.call_stream import CallStream, JsonSpan
from deepinfer_recipe.parsing.output_sink import OutputSink
from deepinfer_recipe.parsing.partial_match import Patterns

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters", "args")


class JsonCalls:
    """Hands calls on: what every way of writing them has in common."""

    def __init__(self, sink: OutputSink, repairs: list[str], spell: Callable[[str], str]) -> None:
        self._sink = sink
        self._spell = spell
        self.repairs = repairs

    def stream(self, accepts: Callable[[str], bool] = lambda name: True) -> CallStream:
        """A reader of one call, or of a list of them, that hands on what it can at once."""
        return CallStream(self._sink, self.repairs, self._spell, self.emit, accepts)

    def emit(self, text: str) -> bool:
        """The calls that a JSON text spells; False, and nothing done, if it spells none."""
        value = _read(text)
        if value is None and text.strip():
            value = _read(text + closing_of(text))
            if value is not None:
                self.repairs.append("a call cut short was closed")
        calls = value if isinstance(value, list) else [value]
        found = [_call(one) for one in calls]
        if not found or None in found:
            return False
        for call in found:
            if call is not None:
                self.emit_call(*call)
        return True

    def emit_call(self, name: str, arguments: Any) -> None:
        """One call with its arguments, whatever they are."""
        if isinstance(arguments, str):
            inner = _read(arguments) if arguments.strip() else {}
            arguments = arguments if inner is None else inner
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            self.repairs.append("arguments that were no JSON object were put into one")
            arguments = {"arguments": arguments}
        self._sink.call_started(name)
        self._sink.call_arguments(json.dumps(arguments, ensure_ascii=False))
        self._sink.call_ended()


def _read(text: str) -> Any:
    try:
        return loads(text.strip())
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, Any] | None:
    """Name and arguments of one call."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        value = inner
    name = next((value[key] for key in _NAMES if isinstance(value.get(key), str)), None)
    if not name:
        return None
    return name, next((value[key] for key in _ARGUMENTS if key in value), {})


class TaggedCallParser:
    """Calls of the Hermes kind: one JSON object (or a list) between two tags."""

    def __init__(self, closing: str, sink: OutputSink, spell: Callable[[str], str]) -> None:
        self.repairs: list[str] = []
        self._calls = JsonCalls(sink, self.repairs, spell)
        self._closing = closing
        self._spell = spell
        self._patterns = Patterns((closing,))
        self._text: list[str] = []
        self._hidden: list[str] = []
        """From a closing tag inside a string on, until the string ends."""
        self._hiding = 0
        """How many strings had ended where that tag came."""
        self._span = JsonSpan()
        self._stream = self._calls.stream()
        self._lost: list[str] = []
        self.is_inside = False

    def feed(self, text: str) -> tuple[str | None, str]:
        """Take text; returns `(text behind the closing tag, "")` or `(None, text held back)`."""
        self.is_inside = True
        position = 0
        while True:
            end = text.find(self._closing, position)
            if end < 0:
                break
            self._add(text[position:end])
            position = end + len(self._closing)
            if not self._span.in_string:
                self._end()
                return text[position:], ""
            # The closing tag inside a string is part of it, if the string ends.
            if not self._hidden:
                self._hiding = self._span.strings
                self._hidden.append("")
            self._add(self._closing)
        rest = text[position:]
        held = self._patterns.held(rest)
        self._add(rest[: len(rest) - held])
        return None, rest[len(rest) - held :]

    def _add(self, text: str) -> None:
        if not text:
            return
        rest = text
        while rest and (end := self._span.feed(rest)) is not None:
            rest = rest[end:]
        if self._hidden:
            self._hidden.append(text)
            if self._span.strings == self._hiding:
                return
            text = "".join(self._hidden)
            self._hidden = []
        if not self._stream.has_begun:
            self._text.append(text)
        self._stream.feed(text)

    def _end(self) -> None:
        text = "".join(self._text)
        if self._stream.has_begun:
            self._lose(self._stream.finish())
        elif text.strip():
            text = self._spell(text)
            if not self._calls.emit(text):
                self._lost.append(text)
        else:
            self.repairs.append("a block of calls that held none was left out")
        self._text, self._hidden = [], []
        self._span = JsonSpan()
        self._stream = self._calls.stream()
        self.is_inside = False

    def _lose(self, text: str) -> None:
        if text.strip():
            self._lost.append(text)

    def take_lost(self) -> str:
        """Text that was no call: it is text of the answer."""
        text = "".join(self._lost).strip()
        self._lost = []
        if text:
            self.repairs.append("text between the tags of a call was kept as text")
        return text

    def finish(self, held: str) -> None:
        """The answer ended before the closing tag did."""
        hidden = "".join(self._hidden)
        if hidden:
            # A quote that was never closed hid the tag.
            self._hidden = []
            before = self._spell("".join(self._text))
            if self._stream.has_begun or self._calls.emit(before):
                self._lose(self._stream.finish() if self._stream.has_begun else "")
                self._lost.append(self._spell(hidden[len(self._closing) :] + held))
                self._text = []
                self._stream = self._calls.stream()
                return
            self._text.append(hidden)
        if not self._span.in_string and held and self._closing.startswith(held):
            held = ""
        if self._stream.has_begun:
            self._stream.feed(held)
        self._text.append(held)
        self._end()


class MarkedCallParser:
    """Calls of the Mistral kind: behind a mark a list of calls, or a name and its arguments."""

    _HEAD = re.compile(r"\s*([^\s\[{]+)\s*")

    def __init__(self, arguments_mark: str, sink: OutputSink, spell: Callable[[str], str]) -> None:
        self.repairs: list[str] = []
        self._calls = JsonCalls(sink, self.repairs, spell)
        self._stream = self._calls.stream()
        self._mark = arguments_mark
        self._spell = spell
        self._head = ""
        self._name: str | None = None
        self._text: list[str] = []
        self._span: JsonSpan | None = None
        self._lost: list[str] = []
        self.is_inside = False

    def feed(self, text: str) -> tuple[str | None, str]:
        """Take text; returns `(text behind the calls, "")` or `(None, text held back)`."""
        self.is_inside = True
        if self._span is None:
            text = self._head + text
            start = self._start(text)
            if start is None:
                self._head = text
                return None, ""
            if start < 0:
                self._give_up()
                return text, ""
            self._head = ""
            text = text[start:]
            self._span = JsonSpan()
            self._stream = self._calls.stream()
            if self._name is not None:
                self._stream.begin(self._name)
        end = self._span.feed(text)
        self._add(text[:end])
        if end is None:
            return None, ""
        self._end()
        return text[end:], ""

    def _add(self, text: str) -> None:
        if not self._stream.has_begun:
            self._text.append(text)
        self._stream.feed(text)

    def _start(self, text: str) -> int | None:
        """Where the JSON begins; None while that is not known, -1 if there is none."""
        body = text.lstrip()
        if not body:
            return None
        blanks = len(text) - len(body)
        if body[0] in "[{":
            if self._mark.startswith(body) and body != "[":
                return None
            return blanks
        head = self._HEAD.match(text)
        if head is None or len(head.group(1)) > 256:
            return -1
        behind = text[head.end() :]
        if behind.startswith(self._mark):
            behind = behind[len(self._mark) :]
        elif not behind or self._mark.startswith(behind):
            return None
        lead = len(behind) - len(behind.lstrip())
        if lead == len(behind):
            return None
        if behind[lead] != "{":
            return -1
        self._name = head.group(1)
        return len(text) - len(behind) + lead

    def _give_up(self) -> None:
        self.repairs.append("the mark of calls stood before none and was left out")
        self._head = ""
        self.is_inside = False

    def _end(self) -> None:
        self._name = None
        text = "".join(self._text)
        if self._stream.has_begun:
            self._lost.append(self._stream.finish())
        elif not self._calls.emit(self._spell(text)):
            self._lost.append(text)
        self._text = []
        self._span = None
        self.is_inside = False

    def take_lost(self) -> str:
        """Text that was no call: it is text of the answer."""
        text = self._spell("".join(self._lost)).strip()
        self._lost = []
        if text:
            self.repairs.append("text behind the mark of calls was kept as text")
        return text

    def finish(self, held: str) -> None:
        """The answer ended before the JSON did."""
        if self._span is None:
            self._lost.append(self._head + held)
            self._give_up()
            return
        self._add(held)
        self._end()


class BareCalls:
    """Calls of the Llama 3 kind: the answer itself is the JSON, one object after the other.

    `feed` the answer from its beginning; as soon as `text` is not None, the answer is text from
    there on.
    """

    _KEY = re.compile(r'\{\s*"(name|function|type|parameters|arguments)"\s*:')
    _KEYS = ("name", "function", "type", "parameters", "arguments")

    def __init__(
        self, sink: OutputSink, declared: Mapping[str, Any], spell: Callable[[str], str]
    ) -> None:
        self.repairs: list[str] = []
        self._calls = JsonCalls(sink, self.repairs, spell)
        self._stream = self._calls.stream(self._accepts)
        self._declared = declared
        self._spell = spell
        self._blanks = ""
        self._text: list[str] = []
        self._span: JsonSpan | None = None
        self._head = ""

    def _accepts(self, name: str) -> bool:
        return not self._declared or name in self._declared

    def feed(self, text: str) -> str | None:
        """Take text; returns what is text of the answer, None to wait for more."""
        while True:
            if self._span is None:
                text = self._head + text
                self._head = ""
                body = text.lstrip(" \n\t;,")
                if not body:
                    self._head = text
                    return None
                if not self._may_begin(body):
                    return text
                if self._KEY.match(body) is None:
                    self._head = text
                    return None
                self._blanks = text[: len(text) - len(body)]
                self._span = JsonSpan()
                self._stream = self._calls.stream(self._accepts)
                text = body
            end = self._span.feed(text)
            if not self._stream.has_begun:
                self._text.append(text[:end])
            self._stream.feed(text[:end])
            if end is None:
                return None
            rest = text[end:]
            lost = self._end(is_cut=False)
            if lost:
                return lost + rest
            text = rest
            if not text:
                return None

    def _may_begin(self, body: str) -> bool:
        """Whether the text begins, or may come to begin, as a call does."""
        if self._KEY.match(body):
            return True
        flat = re.sub(r"\s+", "", body)
        return any(f'{{"{key}":'.startswith(flat) for key in self._KEYS)

    def _end(self, *, is_cut: bool) -> str:
        """The object is over; returns what of it is text of the answer."""
        if self._stream.has_begun:
            self._text = []
            self._span = None
            return self._stream.finish()
        text = self._spell("".join(self._text))
        value = _read(text) if not is_cut else _read(text + closing_of(text))
        call = _call(value)
        if call is None or not self._accepts(call[0]):
            return self._release()
        if is_cut:
            self.repairs.append("a call cut short was closed")
        self._calls.emit_call(*call)
        self._text = []
        self._span = None
        return ""

    def _release(self) -> str:
        text = self._blanks + "".join(self._text)
        self._text = []
        self._span = None
        return text

    def finish(self) -> str:
        """The answer is over; returns what of it is text."""
        text = self._head if self._span is None else self._end(is_cut=True)
        self._head = ""
        return text if text.strip(" \n\t;,") else ""
