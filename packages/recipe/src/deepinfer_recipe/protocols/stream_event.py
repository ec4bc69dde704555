"""Events of a streamed answer: cheap to make, turned into JSON only when asked."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.json_text import between


class StreamEvent:
    """One event of a streamed answer, consumed by response accumulation.

    Most events differ from their neighbour in one text. They are kept as the JSON before the
    text, the text, and the JSON behind it; an event without a text keeps its whole JSON first.
    `kind`, `text` and `data` are for accumulation.
    """

    __slots__ = ("_head", "_tail", "data", "kind", "text")

    def __init__(
        self, kind: str, head: str, text: str | None = None, tail: str = "", data: Any = None
    ) -> None:
        self.kind = kind
        self._head = head
        self.text = text
        self._tail = tail
        self.data = data

    def to_json(self) -> str:
        """The event as compact JSON text."""
        if self.text is None:
            return self._head
        return between(self._head, self.text, self._tail)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_json()})"
