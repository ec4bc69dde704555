"""Events of a streamed answer: cheap to make, turned into JSON only when asked."""

from __future__ import annotations

from json.encoder import encode_basestring as quote
from typing import Any


class StreamEvent:
    """One event of a streamed answer, consumed by response accumulation.

    Most events differ from their neighbour in one text. They are kept as the JSON before the
    text, the text, and the JSON behind it; an event without a text keeps its whole JSON first.
    """

    __slots__ = ("_data", "_head", "_kind", "_tail", "_text")

    def __init__(
        self, kind: str, head: str, text: str | None = None, tail: str = "", data: Any = None
    ) -> None:
        self._kind = kind
        self._head = head
        self._text = text
        self._tail = tail
        self._data = data

    def to_json(self) -> str:
        """The event as compact JSON text."""
        if self._text is None:
            return self._head
        return f"{self._head}{quote(self._text)}{self._tail}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_json()})"
