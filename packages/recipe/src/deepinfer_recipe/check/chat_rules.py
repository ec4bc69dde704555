"""What a Chat Completions answer must be, whole and streamed."""

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

_REASONS = ("stop", "length", "tool_calls", "content_filter", "insufficient_system_resource")


def _check_usage(problems: Problems, usage: Any) -> None:
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    counts = check_counts(problems, usage, names, "usage")
    if len(counts) == 3:
        problems.need(
            counts[2] == counts[0] + counts[1],
            f"usage: {counts[0]} + {counts[1]} tokens are not {counts[2]}",
        )
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens") or 0
        problems.need(cached <= counts[0], "usage: more tokens cached than sent")


def _check_reason(problems: Problems, reason: Any, where: str, *, calls: bool) -> None:
    problems.need(reason in _REASONS, f"{where}.finish_reason: got {shown(reason)}")
    if reason == "tool_calls":
        problems.need(calls, f"{where}.finish_reason: tool_calls without a call")
    elif calls:
        problems.need(reason != "stop", f"{where}.finish_reason: stop behind a call")


def check_response(body: Any) -> Problems:
    """A whole answer."""
    problems = Problems()
    problems.field(body, "id", str)
    problems.field(body, "created", int)
    problems.field(body, "model", str)
    if isinstance(body, dict):
        problems.need(
            body.get("object") == "chat.completion", f"object: got {shown(body.get('object'))}"
        )
    _check_usage(problems, problems.field(body, "usage", dict) or {})
    choices = problems.field(body, "choices", list) or []
    problems.need(bool(choices), "choices: empty")
    for number, choice in enumerate(choices):
        where = f"choices[{number}]"
        index = problems.field(choice, "index", int, where=where)
        problems.need(index == number, f"{where}.index: got {shown(index)}")
        message = problems.field(choice, "message", dict, where=where)
        if message is None:
            continue
        problems.need(message.get("role") == "assistant", f"{where}.message.role: not assistant")
        problems.field(message, "content", str, type(None), where=f"{where}.message")
        calls = message.get("tool_calls") or []
        _check_reason(problems, choice.get("finish_reason"), where, calls=bool(calls))
        is_whole = choice.get("finish_reason") == "tool_calls"
        for at, call in enumerate(calls):
            _check_call(problems, call, f"{where}.message.tool_calls[{at}]", is_whole=is_whole)
    return problems


def _check_call(problems: Problems, call: Any, where: str, *, is_whole: bool) -> None:
    problems.need(bool(problems.field(call, "id", str, where=where)), f"{where}.id: empty")
    function = problems.field(call, "function", dict, where=where)
    if function is None:
        return
    name = problems.field(function, "name", str, where=f"{where}.function")
    problems.need(bool(name), f"{where}.function.name: empty")
    arguments = problems.field(function, "arguments", str, where=f"{where}.function")
    if is_whole:
        check_json_object(problems, arguments, f"{where}.function.arguments")


class _Choice:
    """A choice, as its chunks tell it."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.reason: str | None = None
        self.has_role = False


def check_stream(events: Sequence[Event], request: dict[str, Any]) -> Problems:
    """All events of a streamed answer."""
    problems = Problems()
    choices: dict[int, _Choice] = {}
    ids: set[Any] = set()
    usages: list[Any] = []
    if problems.need(bool(events), "no events"):
        problems.need(events[-1].data == "[DONE]", "the stream does not end with [DONE]")
    for number, event in enumerate(events):
        where = f"event {number}"
        problems.need(event.name is None, f"{where}: has the name {event.name!r}")
        if event.data == "[DONE]":
            problems.need(number == len(events) - 1, f"{where}: [DONE] before the end")
            continue
        chunk = parsed(problems, event.data, where)
        if not isinstance(chunk, dict):
            continue
        if "error" in chunk:
            problems.append(f"{where}: an error: {shown(chunk['error'])}")
            continue
        ids.add(chunk.get("id"))
        problems.need(chunk.get("object") == "chat.completion.chunk", f"{where}: wrong object")
        if chunk.get("usage") is not None:
            usages.append(chunk["usage"])
        for choice in problems.field(chunk, "choices", list, where=where) or []:
            index = problems.field(choice, "index", int, where=where)
            if index is not None:
                _follow(problems, choices.setdefault(index, _Choice()), choice, where)
    problems.need(len(ids) <= 1, f"chunks have {len(ids)} different ids")
    for index, choice in choices.items():
        where = f"choice {index}"
        _check_reason(problems, choice.reason, where, calls=bool(choice.calls))
        for at, call in enumerate(choice.calls):
            is_whole = choice.reason == "tool_calls"
            _check_call(problems, call, f"{where}.tool_calls[{at}]", is_whole=is_whole)
    problems.need(bool(choices), "no choices")
    if (request.get("stream_options") or {}).get("include_usage"):
        problems.need(len(usages) == 1, f"usage: asked for once, sent {len(usages)} times")
    for usage in usages:
        _check_usage(problems, usage)
    return problems


def _follow(problems: Problems, choice: _Choice, told: dict[str, Any], where: str) -> None:
    delta = problems.field(told, "delta", dict, where=where) or {}
    problems.need(choice.reason is None, f"{where}: more behind the finish_reason")
    if not choice.has_role:
        problems.need(delta.get("role") == "assistant", f"{where}: the first delta has no role")
        choice.has_role = True
    for call in delta.get("tool_calls") or []:
        index = problems.field(call, "index", int, where=where)
        if index == len(choice.calls):
            function = call.get("function") or {}
            arguments = function.get("arguments") or ""
            choice.calls.append({**call, "function": {**function, "arguments": arguments}})
        elif problems.need(
            index == len(choice.calls) - 1, f"{where}: call {shown(index)} out of order"
        ):
            piece = (call.get("function") or {}).get("arguments") or ""
            choice.calls[-1]["function"]["arguments"] += piece
    choice.reason = told.get("finish_reason") or choice.reason
