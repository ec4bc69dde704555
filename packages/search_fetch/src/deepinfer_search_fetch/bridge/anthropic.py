"""Content blocks of the Messages API for server-side web_search and web_fetch."""

from __future__ import annotations

from typing import Any

from deepinfer_search_fetch.bridge.policy import ToolPolicy
from deepinfer_search_fetch.bridge.sealed import Seal
from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.models import FetchResponse, SearchResponse

_FETCH_ERRORS = {
    "invalid_argument": "invalid_tool_input",
    "invalid_url": "invalid_tool_input",
    "unsupported_content_type": "unsupported_content_type",
    "response_too_large": "content_too_large",
    "decompression_bomb": "content_too_large",
    "rate_limited": "too_many_requests",
    "host_busy": "too_many_requests",
    "forbidden": "url_not_allowed",
    "blocked_address": "url_not_allowed",
    "blocked_port": "url_not_allowed",
    "blocked_scheme": "url_not_allowed",
    "robots_disallowed": "url_not_allowed",
    "internal": "unavailable",
    "unavailable": "unavailable",
    "insufficient_quota": "unavailable",
    "unauthorized": "unavailable",
}
_SEARCH_ERRORS = {
    "invalid_argument": "invalid_tool_input",
    "rate_limited": "too_many_requests",
    "host_busy": "too_many_requests",
}


def search_blocks(
    tool_use_id: str, query: str, response: SearchResponse, seal: Seal
) -> list[dict[str, Any]]:
    """server_tool_use and web_search_tool_result with one web_search_result per hit."""
    results = [
        {
            "type": "web_search_result",
            "url": r.url,
            "title": r.title,
            "encrypted_content": seal.seal(
                {
                    "id": r.id,
                    "url": r.url,
                    "title": r.title,
                    "text": r.content or r.summary or r.snippet,
                }
            ),
            "page_age": r.published[:10] if r.published else None,
        }
        for r in response.results
    ]
    return [
        _use(tool_use_id, "web_search", {"query": query}),
        {"type": "web_search_tool_result", "tool_use_id": tool_use_id, "content": results},
    ]


def fetch_blocks(
    tool_use_id: str, url: str, response: FetchResponse, policy: ToolPolicy, retrieved_at: str
) -> list[dict[str, Any]]:
    """server_tool_use and web_fetch_tool_result with the page as a plain-text document."""
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": response.content},
        "title": response.title,
        "citations": {"enabled": policy.citations},
    }
    result = {
        "type": "web_fetch_result",
        "url": response.final_url,
        "retrieved_at": retrieved_at,
        "content": document,
    }
    return [
        _use(tool_use_id, "web_fetch", {"url": url}),
        {"type": "web_fetch_tool_result", "tool_use_id": tool_use_id, "content": result},
    ]


def error_blocks(
    tool_use_id: str, name: str, tool_input: dict[str, Any], code: str
) -> list[dict[str, Any]]:
    """The tool's error object; at message level this is a success."""
    kind = f"{name}_tool_result"
    return [
        _use(tool_use_id, name, tool_input),
        {
            "type": kind,
            "tool_use_id": tool_use_id,
            "content": {"type": f"{kind}_error", "error_code": code},
        },
    ]


def error_code(name: str, error: SearchFetchError) -> str:
    """The wire code of an error of ours."""
    if name == "web_search":
        return _SEARCH_ERRORS.get(error.code, "unavailable")
    return _FETCH_ERRORS.get(error.code, "url_not_accessible")


def _use(tool_use_id: str, name: str, tool_input: dict[str, Any]) -> dict[str, Any]:
    return {"type": "server_tool_use", "id": tool_use_id, "name": name, "input": tool_input}
