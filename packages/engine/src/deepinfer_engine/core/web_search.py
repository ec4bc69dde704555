"""What the server needs from a web search; `adapters/search_fetch.py` has it from
deepinfer_search_fetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

Dialect = Literal["anthropic", "openai"]


class ToolOutcome(Protocol):
    """One use of a tool: text for the model, blocks for the client, counts."""

    @property
    def blocks_for_model(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def wire_blocks(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def usage(self) -> Mapping[str, int]: ...


class ToolRun(Protocol):
    """The tool uses of one answer."""

    async def run(
        self, name: str, input: Mapping[str, Any], use_id: str, max_tokens: int
    ) -> ToolOutcome:
        """One use; a failure is an outcome too.

        max_tokens: about what the result may take of the model's context.
        """
        ...


class WebSearch(Protocol):
    """Web search for requests that ask the server for it."""

    def start(
        self, dialect: Dialect, declaration: Mapping[str, Any], include: Sequence[str]
    ) -> ToolRun:
        """The uses of an answer, by the tool as the client declared it.

        include: of a Responses request. Raises RequestError for what cannot be honoured.
        """
        ...

    def result_text(self, block: Mapping[str, Any]) -> str:
        """What a result block of an earlier turn told the model."""
        ...
