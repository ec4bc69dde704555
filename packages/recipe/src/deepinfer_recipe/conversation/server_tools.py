"""Tools that the server runs itself while it answers: how a caller is asked to run one.

`run_tool(name, input, policy)` is the caller's; what it returns has the text for the model and
the blocks for the client. `deepinfer-search-fetch` has such a function, this package none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

DEFAULT_MAX_USES = 8
"""How often a tool runs in one answer where the client sets no limit."""

Dialect: TypeAlias = Literal["anthropic", "openai"]


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A server tool as a request declares it.

    declaration: the client's own object, with its domains, location and limits.
    max_uses: how often it may run in one answer.
    """

    dialect: Dialect
    declaration: Mapping[str, Any]
    max_uses: int


@dataclass(frozen=True, slots=True)
class ServerToolPolicy:
    """What the client allows one use of a tool.

    dialect: whether the blocks for the client are `anthropic` content blocks or `openai` items.
    tool: the tool as the client declared it.
    uses: how often it ran in this answer before; fewer than max_uses.
    tool_use_id: the id to give the use in the blocks.
    """

    dialect: Dialect
    tool: Mapping[str, Any]
    max_uses: int
    uses: int
    tool_use_id: str


class ServerToolOutcome(Protocol):
    """What one use of a tool produced."""

    @property
    def blocks_for_model(self) -> Sequence[Mapping[str, Any]]:
        """Blocks `{"type": "text", "text": ...}`: the result as the model reads it."""
        ...

    @property
    def wire_blocks(self) -> Sequence[Mapping[str, Any]]:
        """Content blocks or output items for the client, inserted as they are."""
        ...

    @property
    def usage(self) -> Mapping[str, int]:
        """Counts to report, such as `{"web_search_requests": 1}`."""
        ...


RunTool: TypeAlias = Callable[[str, dict[str, Any], ServerToolPolicy], Awaitable[ServerToolOutcome]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An outcome of this package's own: a use that was refused or failed."""

    blocks_for_model: Sequence[Mapping[str, Any]]
    wire_blocks: Sequence[Mapping[str, Any]]
    usage: Mapping[str, int]


def failed(name: str, input: dict[str, Any], policy: ServerToolPolicy, code: str) -> Outcome:
    """The outcome of a use that did not happen; `code` is Anthropic's name of the reason."""
    told = {
        "max_uses_exceeded": f"No more uses of {name}: the limit of {policy.max_uses} is reached. "
        "Answer with what you know.",
    }
    text = told.get(code, f"{name} is not available now. Answer with what you know.")
    if policy.dialect == "anthropic":
        error = {"type": "web_search_tool_result_error", "error_code": code}
        use_id = policy.tool_use_id
        wire: list[dict[str, Any]] = [
            {"type": "server_tool_use", "id": use_id, "name": name, "input": input},
            {"type": "web_search_tool_result", "tool_use_id": use_id, "content": error},
        ]
    else:
        query = str(input.get("query", ""))
        action = {"type": "search", "query": query, "queries": [query]}
        wire = [
            {
                "type": "web_search_call",
                "id": policy.tool_use_id,
                "status": "failed",
                "action": action,
            }
        ]
    return Outcome([{"type": "text", "text": text}], wire, {})
