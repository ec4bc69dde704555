"""What the output parser tells, piece by piece."""

from __future__ import annotations

from typing import Protocol


class OutputSink(Protocol):
    """Receives the answer; the pieces of one kind concatenate to its text."""

    def reasoning(self, text: str) -> None:
        """More of the thinking."""
        ...

    def content(self, text: str) -> None:
        """More of the answer."""
        ...

    def call_started(self, name: str) -> None:
        """A tool call begins."""
        ...

    def call_arguments(self, piece: str, raw: str | None = None) -> None:
        """More of the arguments' JSON text; `raw` is the piece unescaped, inside a string."""
        ...

    def call_ended(self, meant: str | None = None) -> None:
        """The current call is complete.

        meant: its arguments, where they are not what was written (a parameter came twice).
        """
        ...
