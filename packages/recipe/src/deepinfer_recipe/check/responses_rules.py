"""What a Responses answer must be, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepinfer_recipe.check.rules import (
    Problems,
    check_counts,
    check_json_object,
    parsed,
    shown,
)
from deepinfer_recipe.check.sse import Event

_ENDINGS = ("response.completed", "response.incomplete", "response.failed")


def check_response(body: Any, where: str = "") -> Problems:
    """A whole answer."""
    problems = Problems()
    problems.field(body, "id", str, where=where)
    problems.field(body, "created_at", int, where=where)
    problems.field(body, "model", str, where=where)
    status = problems.field(body, "status", str, where=where)
    problems.need(
        status in ("completed", "incomplete"), f"status: {shown(status)} is no finished answer"
    )
    if isinstance(body, dict):
        problems.need(body.get("object") == "response", f"object: got {shown(body.get('object'))}")
        if status == "incomplete":
            details = problems.field(body, "incomplete_details", dict)
            problems.field(details or {}, "reason", str, where="incomplete_details")
    for number, item in enumerate(problems.field(body, "output", list) or []):
        _check_item(problems, item, f"output[{number}]")
    usage = problems.field(body, "usage", dict) or {}
    counts = check_counts(
        problems, usage, ("input_tokens", "output_tokens", "total_tokens"), "usage"
    )
    if len(counts) == 3:
        problems.need(
            counts[2] == counts[0] + counts[1],
            f"usage: {counts[0]} + {counts[1]} tokens are not {counts[2]}",
        )
    return problems


def _check_item(problems: Problems, item: Any, where: str) -> None:
    kind = problems.field(item, "type", str, where=where)
    problems.need(bool(problems.field(item, "id", str, where=where)), f"{where}.id: empty")
    if kind == "message":
        for at, part in enumerate(problems.field(item, "content", list, where=where) or []):
            name = problems.field(part, "type", str, where=f"{where}.content[{at}]")
            if name == "output_text":
                problems.field(part, "text", str, where=f"{where}.content[{at}]")
                problems.field(part, "annotations", list, where=f"{where}.content[{at}]")
    elif kind == "function_call":
        for name in ("call_id", "name"):
            text = problems.field(item, name, str, where=where)
            problems.need(bool(text), f"{where}.{name}: empty")
        arguments = problems.field(item, "arguments", str, where=where)
        if item.get("status") != "incomplete":
            check_json_object(problems, arguments, f"{where}.arguments")
    elif kind == "reasoning":
        problems.field(item, "summary", list, where=where)


class _Stream:
    """What has been told so far."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.open: dict[str, Any] | None = None
        self.deltas: dict[tuple[str, Any], str] = {}
        self.final: Any = None


def check_stream(events: Sequence[Event], request: dict[str, Any]) -> Problems:
    """All events of a streamed answer."""
    problems = Problems()
    stream = _Stream()
    for number, event in enumerate(events):
        where = f"event {number}"
        payload = parsed(problems, event.data, where)
        if not isinstance(payload, dict):
            continue
        kind = str(payload.get("type"))
        problems.need(kind == event.name, f"{where}: named {event.name!r}, of type {kind!r}")
        told = payload.get("sequence_number")
        problems.need(told == number, f"{where}: sequence_number {shown(told)}")
        problems.need(stream.final is None, f"{where}: {kind} behind the end")
        if number == 0:
            problems.need(kind == "response.created", f"{where}: {kind} is not response.created")
        if kind in ("error", "response.failed"):
            problems.append(f"{where}: an error: {shown(payload)}")
        if kind in _ENDINGS:
            stream.final = payload.get("response")
        else:
            _follow(problems, stream, kind, payload, where)
    if not problems.need(isinstance(stream.final, dict), "the stream does not end with an answer"):
        return problems
    problems += check_response(stream.final)
    problems.need(stream.open is None, "an item is still open at the end")
    problems.need(
        stream.final.get("output") == stream.done,
        "the items of the final response are not those that were told",
    )
    return problems


def _follow(
    problems: Problems, stream: _Stream, kind: str, payload: dict[str, Any], where: str
) -> None:
    if kind == "response.output_item.added":
        problems.need(stream.open is None, f"{where}: an item opens inside another")
        problems.need(
            payload.get("output_index") == len(stream.done), f"{where}: wrong output_index"
        )
        stream.open = problems.field(payload, "item", dict, where=where) or {}
    elif kind == "response.output_item.done":
        item = problems.field(payload, "item", dict, where=where) or {}
        is_same = stream.open is not None and stream.open.get("id") == item.get("id")
        problems.need(is_same, f"{where}: closes an item that is not open")
        _check_item(problems, item, f"{where}.item")
        stream.done.append(item)
        stream.open = None
    elif "item_id" in payload:
        is_open = stream.open is not None and stream.open.get("id") == payload["item_id"]
        problems.need(is_open, f"{where}: {kind} of an item that is not open")
        base, _, step = kind.rpartition(".")
        place = (base, payload.get("content_index"))
        if step == "delta":
            piece = problems.field(payload, "delta", str, where=where) or ""
            stream.deltas[place] = stream.deltas.get(place, "") + piece
        elif step == "done":
            text = next((payload[n] for n in ("text", "arguments", "input") if n in payload), None)
            if text is not None:
                grown = stream.deltas.pop(place, "")
                problems.need(text == grown, f"{where}: its text is not that of the deltas")
