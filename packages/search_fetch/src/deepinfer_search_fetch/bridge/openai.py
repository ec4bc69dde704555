"""Output items and stream events of the Responses API for web search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_search_fetch.models import SearchResponse


def search_item(
    item_id: str, query: str, response: SearchResponse | None, *, include_sources: bool
) -> dict[str, Any]:
    """A web_search_call with a `search` action; failed when there is no response."""
    action: dict[str, Any] = {"type": "search", "query": query, "queries": [query]}
    if response is not None and include_sources:
        action["sources"] = [{"type": "url", "url": r.url} for r in response.results]
    return _item(item_id, action, ok=response is not None)


def open_page_item(item_id: str, url: str, *, ok: bool) -> dict[str, Any]:
    """A web_search_call with an `open_page` action."""
    return _item(item_id, {"type": "open_page", "url": url}, ok=ok)


def find_item(item_id: str, url: str, pattern: str, *, ok: bool) -> dict[str, Any]:
    """A web_search_call with a `find_in_page` action."""
    return _item(item_id, {"type": "find_in_page", "url": url, "pattern": pattern}, ok=ok)


def stream_events(
    item: Mapping[str, Any], output_index: int, first_number: int
) -> list[dict[str, Any]]:
    """The events a stream tells one web_search_call with, in order.

    first_number: sequence_number of the first of them. A failed call has no `completed` event.
    """
    kinds = ["response.output_item.added"]
    kinds += [f"response.web_search_call.{state}" for state in ("in_progress", "searching")]
    if item["status"] == "completed":
        kinds.append("response.web_search_call.completed")
    kinds.append("response.output_item.done")
    events: list[dict[str, Any]] = []
    for number, kind in enumerate(kinds, first_number):
        event: dict[str, Any] = {
            "type": kind,
            "output_index": output_index,
            "sequence_number": number,
        }
        if kind == "response.output_item.added":
            event["item"] = {**item, "status": "in_progress"}
        elif kind == "response.output_item.done":
            event["item"] = dict(item)
        else:
            event["item_id"] = item["id"]
        events.append(event)
    return events


def annotation_events(
    annotations: list[dict[str, Any]],
    item_id: str,
    output_index: int,
    content_index: int,
    first_number: int,
) -> list[dict[str, Any]]:
    """The events that add url_citations to an output_text."""
    return [
        {
            "type": "response.output_text.annotation.added",
            "item_id": item_id,
            "output_index": output_index,
            "content_index": content_index,
            "annotation_index": index,
            "annotation": annotation,
            "sequence_number": first_number + index,
        }
        for index, annotation in enumerate(annotations)
    ]


def _item(item_id: str, action: dict[str, Any], *, ok: bool) -> dict[str, Any]:
    status = "completed" if ok else "failed"
    return {"type": "web_search_call", "id": item_id, "status": status, "action": action}
