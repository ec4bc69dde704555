"""What the chat server tells the bridge about one tool, and what it gets back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer_search_fetch.errors import InvalidRequestError

Dialect = Literal["anthropic", "openai"]
ToolName = Literal["web_search", "web_fetch"]

# OpenAI's search_context_size -> (results, tokens in all)
CONTEXT_SIZES: dict[str, tuple[int, int]] = {
    "low": (3, 2_000),
    "medium": (6, 6_000),
    "high": (10, 12_000),
}


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """The request's limits on one tool use.

    allowed_domains / blocked_domains: suffix match on labels, applied to Search results and to
        every redirect hop of Fetch; at most one of the two may be set.
    max_uses / uses: the cap of the tool and how often it ran before this call.
    known_urls: URLs that occurred in the conversation; None switches the check off (an operator's
        decision), an empty set means nothing may be fetched.
    """

    dialect: Dialect = "anthropic"
    allowed_domains: tuple[str, ...] = ()
    blocked_domains: tuple[str, ...] = ()
    max_uses: int | None = None
    uses: int = 0
    known_urls: frozenset[str] | None = None
    results: int = 6
    max_tokens: int = 6_000
    citations: bool = False
    include_sources: bool = False
    network: bool = True
    tool_use_id: str | None = None

    def __post_init__(self) -> None:
        if self.allowed_domains and self.blocked_domains:
            raise InvalidRequestError(
                "invalid_argument",
                "allowed_domains and blocked_domains cannot be combined; set one of them",
            )

    @classmethod
    def from_anthropic(cls, tool: Mapping[str, Any], **state: Any) -> ToolPolicy:
        """From a Messages tool object (`web_search_2025…`, `web_fetch_2025…`)."""
        citations = tool.get("citations")
        return cls(
            dialect="anthropic",
            allowed_domains=tuple(tool.get("allowed_domains") or ()),
            blocked_domains=tuple(tool.get("blocked_domains") or ()),
            max_uses=tool.get("max_uses"),
            max_tokens=int(tool.get("max_content_tokens") or 6_000),
            citations=bool(isinstance(citations, Mapping) and citations.get("enabled")),
            **state,
        )

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any], **state: Any) -> ToolPolicy:
        """From a Responses tool object (`web_search`, `web_search_preview`, …)."""
        filters = tool.get("filters")
        allowed = filters.get("allowed_domains") if isinstance(filters, Mapping) else None
        size = str(tool.get("search_context_size") or "medium")
        if size not in CONTEXT_SIZES:
            raise InvalidRequestError(
                "invalid_argument",
                f"search_context_size must be one of {', '.join(CONTEXT_SIZES)}; got {size!r}",
            )
        results, tokens = CONTEXT_SIZES[size]
        return cls(
            dialect="openai",
            allowed_domains=tuple(allowed or ()),
            results=results,
            max_tokens=tokens,
            network=tool.get("external_web_access") is not False,
            **state,
        )


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one tool use produced.

    blocks_for_model: text blocks `{"type": "text", "text": …}` for the model's prompt.
    wire_blocks: content blocks (Anthropic) or output items (OpenAI), inserted verbatim.
    usage: `{"web_search_requests": n, "web_fetch_requests": m}`, successes only.
    urls: URLs that may be fetched from now on (add them to `known_urls`).
    """

    blocks_for_model: list[dict[str, Any]]
    wire_blocks: list[dict[str, Any]]
    usage: dict[str, int]
    urls: frozenset[str] = field(default_factory=frozenset)
    is_error: bool = False
