"""One Responses request over a store: what came before it, and keeping its answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.stores.response_store import ResponseStore, StoredResponse

MAX_CHAIN = 1000
"""Most answers that one request may go back."""

_ID_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
}


class ResponseTurn:
    """A request body, read against a store.

    history: the items before this request's own, oldest first; None when it continues nothing.
    stores: whether the client wants its answer kept (`store`, true unless said otherwise).

    Raises `ConversionError` with status 404 when the answer to go on from is not there.
    """

    def __init__(self, body: Mapping[str, Any], store: ResponseStore, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._body = body
        previous, stores = body.get("previous_response_id"), body.get("store")
        for name, value, kind in (
            ("previous_response_id", previous, str),
            ("store", stores, bool),
        ):
            if value is not None and not isinstance(value, kind):
                raise ConversionError(
                    f"{name}: expected {'a string' if kind is str else 'true or false'}, "
                    f"got {value!r:.60}",
                    param=name,
                )
        self.stores: bool = stores is not False
        self._previous: str | None = previous
        self.history: list[dict[str, Any]] | None = None
        if previous is not None:
            self.history = self._items_before(previous)

    def _items_before(self, previous: str) -> list[dict[str, Any]]:
        chain: list[StoredResponse] = []
        wanted: str | None = previous
        while wanted is not None:
            found = self._store.get(self._owner, wanted)
            if found is None:
                before = "" if not chain else f", which '{chain[-1].id}' continues,"
                raise ConversionError(
                    f"Previous response with id '{wanted}'{before} not found.",
                    param="previous_response_id",
                    status_code=404,
                    code="previous_response_not_found",
                )
            chain.append(found)
            if len(chain) > MAX_CHAIN:
                raise ConversionError(
                    f"previous_response_id: at most {MAX_CHAIN} responses are continued; send "
                    "the history in input",
                    param="previous_response_id",
                )
            wanted = found.previous_id
        items: list[dict[str, Any]] = []
        for stored in reversed(chain):
            items += [*stored.input_items, *stored.response["output"]]
        return items

    def keep(self, response: Mapping[str, Any]) -> bool:
        """Keep the finished answer if the client wants it kept; whether it is."""
        if not self.stores:
            return False
        stored = StoredResponse(
            id=response["id"],
            previous_id=self._previous,
            created=response["created_at"],
            input_items=_with_ids(self._body.get("input")),
            response=dict(response),
        )
        return self._store.put(self._owner, stored)


def dereferenced(given: Any, store: ResponseStore, owner: str) -> Any:
    """An `input` with the kept items in place of its `item_reference`s.

    The AI SDK refers to the items of answers that it believes to be kept, which is what the API
    does unless asked otherwise. An item's id holds the id of its answer.

    Raises `ConversionError` with status 404 for an item that is not there.
    """
    if not isinstance(given, list):
        return given
    return [
        _kept_item(item.get("id"), at, store, owner)
        if isinstance(item, dict) and item.get("type") == "item_reference"
        else item
        for at, item in enumerate(given)
    ]


def _kept_item(item_id: Any, at: int, store: ResponseStore, owner: str) -> dict[str, Any]:
    response_id = str(item_id).partition("_")[2].rpartition("_")[0]
    answer = store.get(owner, response_id) if response_id else None
    for item in [] if answer is None else answer.response["output"]:
        if item.get("id") == item_id:
            return item
    raise ConversionError(
        f"Item with id '{item_id}' not found. Items of answers with `store` false are not kept.",
        param=f"input[{at}].id",
        status_code=404,
    )


def message_item(text: str) -> dict[str, Any]:
    """A plain text input as the item that it stands for."""
    return {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": text}],
    }


def _with_ids(given: Any) -> list[dict[str, Any]]:
    """The request's own items as they can be listed: each with a type and an id."""
    if given is None:
        return []
    items = [message_item(given)] if isinstance(given, str) else given
    listed: list[dict[str, Any]] = []
    taken: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        item_id = item.get("id")
        # A page goes on behind an id: with one given twice, paging would never come to its end.
        if not item_id or item_id in taken:
            item_id = f"{_ID_PREFIX.get(kind, 'item')}_{secrets.token_hex(16)}"
        taken.add(item_id)
        listed.append({**item, "type": kind, "id": item_id})
    return listed


def input_item_list(
    stored: StoredResponse, *, limit: int = 20, after: str | None = None, order: str = "desc"
) -> dict[str, Any]:
    """A page of an answer's own input items, as the Responses API lists them.

    Raises `ConversionError` naming the parameter.
    """
    if not 1 <= limit <= 100:
        raise ConversionError(f"limit: expected 1 to 100, got {limit}", param="limit")
    if order not in ("asc", "desc"):
        raise ConversionError(f"order: expected asc or desc, got {order!r:.40}", param="order")
    items = stored.input_items if order == "asc" else stored.input_items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise ConversionError(f"after: no item has the id {after!r:.60}", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }
