"""How large a regular expression is: how much text it matches, how many steps it counts out to.

Nothing is expanded: the sizes of parts are added and multiplied. What is not understood counts
as text of any length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

MAX_STATES = 10**9
"""More is not told apart."""
_MAX_DEPTH = 64
_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
_GROUP_HEAD = re.compile(r"\?(?::|=|!|<=|<!|P?<[A-Za-z_]\w*>)")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[pP]\{[^}]*\}|.)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class PatternSize:
    """shortest, longest: characters of what the pattern matches, seen from above and below.

    states: steps once every counted repetition is written out.
    """

    shortest: int
    longest: float
    states: int


def pattern_size(pattern: str) -> PatternSize:
    """The size of a regular expression."""
    reader = _Reader(pattern)
    try:
        size = reader.alternatives(0)
    except ValueError:
        return PatternSize(0, inf, len(pattern) + 1)
    return size if reader.at_end else PatternSize(0, inf, len(pattern) + 1)


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._place = 0

    @property
    def at_end(self) -> bool:
        return self._place >= len(self._text)

    def alternatives(self, depth: int) -> PatternSize:
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        size = self._sequence(depth)
        while not self.at_end and self._text[self._place] == "|":
            self._place += 1
            other = self._sequence(depth)
            size = PatternSize(
                min(size.shortest, other.shortest),
                max(size.longest, other.longest),
                min(MAX_STATES, size.states + other.states),
            )
        return size

    def _sequence(self, depth: int) -> PatternSize:
        shortest, longest, states = 0, 0.0, 1
        while not self.at_end and self._text[self._place] not in "|)":
            part = self._repeated(self._atom(depth))
            shortest = min(MAX_STATES, shortest + part.shortest)
            longest += part.longest
            states = min(MAX_STATES, states + part.states)
        return PatternSize(shortest, longest, states)

    def _atom(self, depth: int) -> PatternSize:
        text, start = self._text, self._place
        first = text[start]
        if first == "(":
            self._place += 1
            head = _GROUP_HEAD.match(text, self._place)
            if head:
                self._place = head.end()
            inner = self.alternatives(depth + 1)
            if self.at_end:
                raise ValueError("a group is not closed")
            self._place += 1
            looks = head is not None and head.group() in ("?=", "?!", "?<=", "?<!")
            return PatternSize(0, 0, inner.states) if looks else inner
        if first == "[" or first == "\\":
            found = (_CLASS if first == "[" else _ESCAPE).match(text, start)
            if found is None:
                raise ValueError("not closed")
            self._place = found.end()
            return PatternSize(0, 0, 1) if found.group() in (r"\b", r"\B") else PatternSize(1, 1, 1)
        self._place += 1
        if first in "^$":
            return PatternSize(0, 0, 1)
        return PatternSize(1, 1, 1)

    def _repeated(self, atom: PatternSize) -> PatternSize:
        while not self.at_end:
            first = self._text[self._place]
            if first in "*+?":
                self._place += 1
                atom = _times(atom, int(first == "+"), 1 if first == "?" else inf)
            elif first == "{" and (found := _COUNT.match(self._text, self._place)):
                low, comma, high = found.groups()
                if not low and not high:
                    return atom
                self._place = found.end()
                least = int(low or 0)
                most = least if not comma else (int(high) if high else inf)
                atom = _times(atom, least, most)
            else:
                return atom
        return atom


def _times(atom: PatternSize, least: int, most: float) -> PatternSize:
    copies = int(most) if most != inf else max(1, least)
    return PatternSize(
        min(MAX_STATES, atom.shortest * least),
        0 if atom.longest == 0 or most == 0 else atom.longest * most,
        min(MAX_STATES, atom.states * max(1, copies)),
    )
