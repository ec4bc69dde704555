"""Events of a streamed answer: cheap to make, turned into JSON only when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer_recipe.base.json_text import between
from deepinfer_recipe.native import routines as native

if TYPE_CHECKING or native is None:

    class _Fields:
        """What an event consists of; the compiled part has a type like it."""

        __slots__ = ("_head", "_tail", "data", "kind", "text")

        kind: str
        _head: str
        text: str | None
        _tail: str
        data: Any

        def to_json(self) -> str:
            """The event as compact JSON text."""
            if self.text is None:
                return self._head
            return between(self._head, self.text, self._tail)

else:
    _Fields = native.Event


class StreamEvent(_Fields):
    """One event of a streamed answer, consumed by response accumulation.

    Most events differ from their neighbour in one text. They are kept as the JSON before the
    text, the text, and the JSON behind it; an event without a text keeps its whole JSON first.
    `kind`, `text` and `data` are for accumulation.
    """

    __slots__ = ()

    def __init__(
        self, kind: str, head: str, text: str | None = None, tail: str = "", data: Any = None
    ) -> None:
        self.kind = kind
        self._head = head
        self.text = text
        self._tail = tail
        self.data = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_json()})"


E = TypeVar("E", bound=StreamEvent)


def maker(event_type: type[E]) -> Callable[[str, str, str | None, str, Any], E]:
    """The fastest way to make events of a type: from kind, head, text, tail and data."""
    return event_type if native is None else event_type.of  # type: ignore[attr-defined]
