"""Output items of the Responses API for web search."""

from __future__ import annotations

from typing import Any

from deepinfer_search_fetch.models import SearchResponse


def search_items(
    item_id: str, query: str, response: SearchResponse | None, *, include_sources: bool
) -> list[dict[str, Any]]:
    """One web_search_call with a `search` action; failed when there is no response."""
    action: dict[str, Any] = {"type": "search", "query": query, "queries": [query]}
    if response is not None and include_sources:
        action["sources"] = [{"type": "url", "url": r.url} for r in response.results]
    status = "completed" if response is not None else "failed"
    return [{"type": "web_search_call", "id": item_id, "status": status, "action": action}]


def open_page_items(item_id: str, url: str, *, ok: bool) -> list[dict[str, Any]]:
    """One web_search_call with an `open_page` action."""
    return [
        {
            "type": "web_search_call",
            "id": item_id,
            "status": "completed" if ok else "failed",
            "action": {"type": "open_page", "url": url},
        }
    ]
