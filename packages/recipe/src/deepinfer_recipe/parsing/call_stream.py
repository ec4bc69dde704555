"""Calls written as JSON, handed on while they come.

As soon as the beginning of a call names it and opens its arguments, as in
`{"name": "get", "arguments": {`, the call is begun and its arguments follow as they arrive. Calls
that are written in another order are left to those who wait for the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from deepinfer_recipe.base.json_text import loads
from deepinfer_recipe.parsing.json_pieces import JsonPieces
from deepinfer_recipe.parsing.output_sink import OutputSink

MAX_HEAD = 1024
"""A call whose arguments begin later is not handed on before it is complete."""
_SIGNIFICANT = re.compile(r'["\\{}\[\]]')
_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
_TOKEN = re.compile(rf"\s*({_STRING}|[{{\[:,])")
_TOKEN_BEGINS = re.compile(r'\s*(?:"(?:[^"\\\x00-\x1f]|\\.)*\\?)?')
_KEYS = {
    **dict.fromkeys(('"type"', '"id"'), "side"),
    '"name"': "name",
    '"function"': "function",
    **dict.fromkeys(('"arguments"', '"parameters"', '"args"'), "arguments"),
}
# What may follow in the beginning of a call: a key that means something, or a token's first sign.
_STEPS: dict[str, dict[str, str]] = {
    "open": {"{": "key"},
    "key": {"side": "side colon", "name": "name colon", "function": "function colon"},
    "side colon": {":": "side"},
    "side": {'"': "side comma"},
    "side comma": {",": "key"},
    "name colon": {":": "name"},
    "name": {'"': "name comma"},
    "function colon": {":": "function"},
    "function": {"{": "key", '"': "name comma"},
    "name comma": {",": "arguments key"},
    "arguments key": {"arguments": "arguments colon"},
    "arguments colon": {":": "arguments"},
    "arguments": {"{": "end"},
}


class JsonSpan:
    """Finds the end of one JSON object or list in text that arrives in pieces.

    depth: how many objects and lists are open where the text begins.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "strings")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.strings = 0
        """How many strings have ended."""

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._in_string

    def feed(self, text: str) -> int | None:
        """Where in `text` the value ends, None while it goes on."""
        position = 0
        if self._escaped and text:
            self._escaped = False
            position = 1
        while found := _SIGNIFICANT.search(text, position):
            position = found.end()
            sign = found.group()
            if self._in_string:
                if sign == "\\":
                    self._escaped = position == len(text)
                    position += 1
                elif sign == '"':
                    self._in_string = False
                    self.strings += 1
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._depth = 0
                    return position
        return None


class _Head(NamedTuple):
    """The beginning of a call: its name, where its arguments begin, the objects open there."""

    name: str
    start: int
    depth: int


def _head(text: str) -> _Head | Literal[False] | None:
    """Read the beginning of a call; None while more must come, False if it is another."""
    position, depth, state, name = 0, 0, "open", ""
    while state != "end":
        found = _TOKEN.match(text, position)
        if found is None:
            return None if _TOKEN_BEGINS.fullmatch(text, position) else False
        token, position = found.group(1), found.end()
        steps = _STEPS[state]
        step = steps.get(_KEYS.get(token, ""), "") or steps.get(token[0], "")
        if not step:
            return False
        state = step
        if state == "name comma":
            name = token
        depth += state == "key" and token == "{"
    try:
        spelled = loads(name)
    except ValueError:
        return False
    return _Head(spelled, position - 1, depth) if spelled else False


class CallStream:
    """Reads one call or a list of them; parts that do not begin in the usual way are not read.

    accepts: tells whether a tool of this name may be called.
    """

    def __init__(
        self,
        sink: OutputSink,
        repairs: list[str],
        spell: Callable[[str], str],
        emit_whole: Callable[[str], bool],
        accepts: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """emit_whole: hands on the calls that a whole JSON text spells, if it spells any."""
        self._sink = sink
        self._repairs = repairs
        self._spell = spell
        self._emit_whole = emit_whole
        self._accepts = accepts
        self._state = self._beginning
        self._held = ""
        self._in_list = False
        self._arguments: JsonPieces | None = None
        self._tail = JsonSpan()
        self._depth = 0
        self._rest: list[str] = []
        """What is not read: of another form, or no JSON."""
        self.has_begun = False
        """Whether something was handed on; until then it is not to be asked for anything."""

    def begin(self, name: str) -> None:
        """A call of this name begins; its arguments are what is fed from now on."""
        self.has_begun = True
        self._depth = 0
        self._sink.call_started(self._spell(name))
        self._arguments = JsonPieces(self._sink.call_arguments, self._repairs, self._spell)
        self._state = self._in_arguments

    def feed(self, text: str) -> None:
        """Take text."""
        rest: str | None = text
        while rest:
            rest = self._state(rest)

    def finish(self) -> str:
        """The text of the calls is over; returns what of it is no call."""
        lost = ""
        if self._state == self._in_arguments and self._arguments is not None:
            self._repairs.append("a call cut short was closed")
            lost = self._end_arguments(self._arguments, is_complete=False)
        elif self._held or self._rest:
            lost = self._held + "".join(self._rest)
            opening = "[" if self._in_list and lost.rstrip().endswith("]") else ""
            if self._state != self._unread and self._emit_whole(self._spell(opening + lost)):
                lost = ""
        self._held, self._rest = "", []
        return self._spell(lost)

    # -- states ---------------------------------------------------------------------------

    def _beginning(self, text: str) -> str | None:
        """Before the first call: a list may open."""
        body = text.lstrip()
        if not body:
            return None
        self._in_list = body[0] == "["
        self._state = self._opening
        return body[1:] if self._in_list else body

    def _opening(self, text: str) -> str | None:
        text = self._held + text
        self._held = ""
        head = _head(text[:MAX_HEAD])
        if head is None and len(text) < MAX_HEAD:
            self._held = text
            return None
        if not head or not self._accepts(head.name):
            self._state = self._other
            return text
        self.begin(head.name)
        self._depth = head.depth
        return text[head.start :]

    def _in_arguments(self, text: str) -> str | None:
        arguments = self._arguments
        assert arguments is not None, "this state begins with them"
        rest = arguments.feed(text)
        if rest is None:
            return None
        is_broken = arguments.is_broken
        lost = self._end_arguments(arguments, is_complete=not is_broken)
        if is_broken:
            self._repairs.append("arguments that were no JSON end where they stopped being it")
            self._state = self._unread
            return lost + rest
        self._tail = JsonSpan(self._depth)
        self._state = self._behind_arguments if self._depth else self._unread
        return rest

    def _end_arguments(self, arguments: JsonPieces, *, is_complete: bool) -> str:
        lost = "" if is_complete else arguments.close()
        self._sink.call_ended(arguments.meant)
        self._state = self._unread
        return lost

    def _behind_arguments(self, text: str) -> str | None:
        """What else a call says (an id) means nothing here."""
        end = self._tail.feed(text)
        if end is None:
            return None
        self._state = self._between
        return text[end:]

    def _between(self, text: str) -> str | None:
        text = text.lstrip(" \t\r\n,;")
        if not text:
            return None
        if text[0] == "]" and self._in_list:
            self._in_list = False
            text = text[1:]
        elif text[0] == "{":
            self._state = self._opening
        else:
            self._state = self._unread
        return text

    def _other(self, text: str) -> str | None:
        self._rest.append(text)
        return None

    def _unread(self, text: str) -> str | None:
        self._rest.append(text)
        return None
