"""What a Messages answer must be, whole and streamed."""

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

_REASONS = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal")
_TEXT = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "input_json_delta": ("tool_use", "partial_json"),
    "signature_delta": ("thinking", "signature"),
}


def _check_block(problems: Problems, block: Any, where: str) -> str | None:
    kind = problems.field(block, "type", str, where=where)
    if kind in ("text", "thinking"):
        problems.field(block, kind, str, where=where)
    elif kind == "tool_use":
        problems.need(bool(problems.field(block, "id", str, where=where)), f"{where}.id: empty")
        problems.need(bool(problems.field(block, "name", str, where=where)), f"{where}.name: empty")
        problems.field(block, "input", dict, where=where)
    return kind


def _check_end(problems: Problems, reason: Any, kinds: Sequence[str | None]) -> None:
    problems.need(reason in _REASONS, f"stop_reason: got {shown(reason)}")
    calls = "tool_use" in kinds
    if reason == "tool_use":
        problems.need(calls, "stop_reason: tool_use without a tool_use block")
    elif calls:
        problems.need(reason != "end_turn", "stop_reason: end_turn behind a tool_use block")


def _check_head(problems: Problems, message: Any) -> None:
    problems.field(message, "id", str)
    problems.field(message, "model", str)
    for name, value in (("type", "message"), ("role", "assistant")):
        found = problems.field(message, name, str)
        problems.need(found == value, f"{name}: expected {value}, got {shown(found)}")


def check_response(body: Any) -> Problems:
    """A whole answer."""
    problems = Problems()
    _check_head(problems, body)
    content = problems.field(body, "content", list) or []
    kinds = [_check_block(problems, b, f"content[{n}]") for n, b in enumerate(content)]
    reason = problems.field(body, "stop_reason", str)
    _check_end(problems, reason, kinds)
    if reason == "stop_sequence":
        problems.field(body, "stop_sequence", str)
    usage = problems.field(body, "usage", dict) or {}
    check_counts(problems, usage, ("input_tokens", "output_tokens"), "usage")
    return problems


class _Stream:
    """What has been told so far."""

    def __init__(self) -> None:
        self.blocks: list[str | None] = []
        self.open: str | None = None
        self.text: list[str] = []
        self.state = "before message_start"
        self.reason: Any = None


def check_stream(events: Sequence[Event], request: dict[str, Any]) -> Problems:
    """All events of a streamed answer."""
    problems = Problems()
    stream = _Stream()
    for number, event in enumerate(events):
        where = f"event {number}"
        payload = parsed(problems, event.data, where)
        if not isinstance(payload, dict):
            continue
        kind = payload.get("type")
        problems.need(kind == event.name, f"{where}: named {event.name!r}, of type {shown(kind)}")
        if kind == "error":
            problems.append(f"{where}: an error: {shown(payload.get('error'))}")
        elif kind == "message_start":
            problems.need(number == 0, f"{where}: message_start is not the first event")
            _check_head(problems, payload.get("message"))
            stream.state = "message"
        elif kind != "ping":
            problems.need(
                stream.state == "message" or kind == "message_stop",
                f"{where}: {kind} {stream.state}",
            )
            _follow(problems, stream, str(kind), payload, where)
    problems.need(stream.state == "over", "the stream does not end with message_stop")
    _check_end(problems, stream.reason, stream.blocks)
    return problems


def _follow(
    problems: Problems, stream: _Stream, kind: str, payload: dict[str, Any], where: str
) -> None:
    index = payload.get("index")
    if kind == "content_block_start":
        problems.need(stream.open is None, f"{where}: a block opens inside another")
        problems.need(index == len(stream.blocks), f"{where}: index {shown(index)} out of order")
        block = payload.get("content_block")
        stream.open = _check_block(problems, block, f"{where}.content_block")
        stream.blocks.append(stream.open)
        stream.text = []
    elif kind == "content_block_delta":
        delta = problems.field(payload, "delta", dict, where=where) or {}
        wanted, name = _TEXT.get(str(delta.get("type")), ("", ""))
        is_last = index == len(stream.blocks) - 1 and stream.open is not None
        problems.need(is_last, f"{where}: a delta of block {shown(index)}, which is not open")
        if name:
            problems.need(
                stream.open == wanted, f"{where}: {delta['type']} in a {stream.open} block"
            )
            text = problems.field(delta, name, str, where=f"{where}.delta")
            stream.text.append(text or "")
    elif kind == "content_block_stop":
        problems.need(stream.open is not None, f"{where}: no block is open")
        if stream.open == "tool_use" and any(stream.text):
            check_json_object(problems, "".join(stream.text), f"{where}: input")
        stream.open = None
    elif kind == "message_delta":
        problems.need(stream.open is None, f"{where}: a block is still open")
        stream.reason = (payload.get("delta") or {}).get("stop_reason")
        check_counts(problems, payload.get("usage") or {}, ("output_tokens",), f"{where}.usage")
        stream.state = "ended"
    elif kind == "message_stop":
        problems.need(stream.state == "ended", f"{where}: message_stop without message_delta")
        stream.state = "over"
    else:
        problems.append(f"{where}: unknown type {shown(kind)}")
