"""What the chat server tells the bridge about one tool, and what it gets back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.errors import InvalidRequestError, SearchFetchError
from deepinfer_search_fetch.json_values import as_list, as_object

Dialect = Literal["anthropic", "openai"]

SEARCH_TYPES = ("web_search_20250305", "web_search_20260209", "web_search_20260318")
FETCH_TYPES = (
    "web_fetch_20250910",
    "web_fetch_20260209",
    "web_fetch_20260309",
    "web_fetch_20260318",
)
OPENAI_TYPES = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
# OpenAI's search_context_size -> (results, tokens in all)
CONTEXT_SIZES: dict[str, tuple[int, int]] = {
    "low": (3, 2_000),
    "medium": (6, 6_000),
    "high": (10, 12_000),
}
MAX_DOMAINS = 100
MAX_TOKENS = 200_000
_SOURCES_INCLUDED = "web_search_call.action.sources"


@dataclass(frozen=True, slots=True)
class ToolPolicy:
    """The request's limits on one tool use.

    allowed_domains / blocked_domains: suffix match on labels, applied to Search results and to
        every redirect hop of Fetch; at most one of the two may be set.
    max_uses / uses: the cap of the tool and how often it ran before this call.
    known_urls: URLs that occurred in the conversation; None switches the check off (an operator's
        decision), an empty set means nothing may be fetched.
    results, max_tokens: of one search, or tokens of one page.
    max_age: seconds a cached page may be old; 0 asks the site again.
    first_source: number of the first result of this use, so that numbers are unique in an answer.
    location: the user's approximate place as the client gave it; country and language of results
        are not filtered by it.
    """

    dialect: Dialect = "anthropic"
    allowed_domains: tuple[str, ...] = ()
    blocked_domains: tuple[str, ...] = ()
    max_uses: int | None = None
    uses: int = 0
    known_urls: frozenset[str] | None = None
    results: int = 6
    max_tokens: int = 6_000
    max_age: int = 86_400
    citations: bool = False
    include_sources: bool = False
    network: bool = True
    tool_use_id: str | None = None
    first_source: int = 1
    location: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.allowed_domains and self.blocked_domains:
            raise InvalidRequestError(
                "invalid_argument",
                "allowed_domains and blocked_domains cannot be combined; set one of them",
            )

    @classmethod
    def from_anthropic(cls, tool: Mapping[str, Any], **state: Any) -> ToolPolicy:
        """From a Messages tool object of any published version of the two tools.

        Raises InvalidRequestError naming the field that cannot be honoured.
        """
        kind = str(tool.get("type"))
        if kind not in SEARCH_TYPES + FETCH_TYPES:
            raise _wrong("type", kind, f"one of {', '.join(SEARCH_TYPES + FETCH_TYPES)}")
        name = "web_search" if kind in SEARCH_TYPES else "web_fetch"
        if tool.get("name", name) != name:
            raise _wrong("name", tool.get("name"), name)
        citations = as_object(tool.get("citations")) or {}
        return cls(
            dialect="anthropic",
            allowed_domains=_domains(tool, "allowed_domains"),
            blocked_domains=_domains(tool, "blocked_domains"),
            max_uses=_count(tool, "max_uses", 1_000_000),
            max_tokens=_count(tool, "max_content_tokens", MAX_TOKENS) or 6_000,
            max_age=0 if tool.get("use_cache") is False else 86_400,
            citations=bool(citations.get("enabled")) or name == "web_search",
            location=_location(tool),
            **state,
        )

    @classmethod
    def from_openai(
        cls, tool: Mapping[str, Any], *, include: Sequence[str] = (), **state: Any
    ) -> ToolPolicy:
        """From a Responses tool object. include: of the request, for the sources of searches."""
        kind = str(tool.get("type"))
        if kind not in OPENAI_TYPES:
            raise _wrong("type", kind, f"one of {', '.join(OPENAI_TYPES)}")
        filters = as_object(tool.get("filters") or {})
        if filters is None:
            raise _wrong("filters", tool.get("filters"), "an object")
        size = str(tool.get("search_context_size") or "medium")
        if size not in CONTEXT_SIZES:
            raise _wrong("search_context_size", size, f"one of {', '.join(CONTEXT_SIZES)}")
        results, tokens = CONTEXT_SIZES[size]
        return cls(
            dialect="openai",
            allowed_domains=_domains(filters, "allowed_domains"),
            blocked_domains=_domains(filters, "blocked_domains"),
            results=results,
            max_tokens=tokens,
            network=tool.get("external_web_access") is not False,
            citations=True,
            include_sources=_SOURCES_INCLUDED in include,
            location=_location(tool),
            **state,
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One result or page as the model read it; `number` is what it cites it by."""

    number: int
    id: str
    url: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What one tool use produced.

    blocks_for_model: text blocks `{"type": "text", "text": …}` for the model's prompt.
    wire_blocks: content blocks (Anthropic) or output items (OpenAI), inserted verbatim.
    usage: `{"web_search_requests": n, "web_fetch_requests": m}`, billable successes only.
    urls: URLs that may be fetched from now on (add them to `known_urls`).
    sources: what the model may cite.
    """

    blocks_for_model: list[dict[str, Any]]
    wire_blocks: list[dict[str, Any]]
    usage: dict[str, int]
    urls: frozenset[str] = field(default_factory=frozenset[str])
    is_error: bool = False
    sources: tuple[Source, ...] = ()


_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")


def _domains(tool: Mapping[str, Any], field_name: str) -> tuple[str, ...]:
    """Host names as the index and the guard spell them. Raises InvalidRequestError."""
    given = as_list(tool.get(field_name) or ())
    if given is None or len(given) > MAX_DOMAINS:
        raise _wrong(field_name, tool[field_name], f"a list of at most {MAX_DOMAINS} host names")
    found: list[str] = []
    for text in given:
        # A scheme, a path, a port or a wildcard would be silently ignored: say so instead.
        plain = isinstance(text, str) and not set(text) & set("/:*?#@ ")
        try:
            host = urls.parse(f"http://{text}/").host if plain else ""
        except SearchFetchError:
            host = ""
        if not _HOST.fullmatch(host):
            raise _wrong(field_name, text, "a host name without scheme, path, port or wildcard")
        found.append(host)
    return tuple(dict.fromkeys(found))


def _count(tool: Mapping[str, Any], field_name: str, most: int) -> int | None:
    value = tool.get(field_name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise _wrong(field_name, value, "a positive integer")
    return min(value, most)


def _location(tool: Mapping[str, Any]) -> dict[str, str]:
    given = as_object(tool.get("user_location") or {})
    if given is None or given.get("type", "approximate") != "approximate":
        raise _wrong("user_location", tool["user_location"], 'an object with type "approximate"')
    names = ("city", "region", "country", "timezone")
    return {n: v for n in names if isinstance(v := given.get(n), str)}


def _wrong(field_name: str, got: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(
        "invalid_argument", f"{field_name}: expected {wanted}, got {str(got)[:80]!r}"
    )
