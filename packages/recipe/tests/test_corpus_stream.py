"""Every recorded answer gives the recorded events and the recorded complete response."""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfer_recipe import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    InferenceChunk,
    InferenceFinishReason,
    MessagesRequest,
    MessagesResponse,
    PromptUsage,
    ResponsesRequest,
    ResponsesResponse,
    StreamProcessor,
)

PROTOCOLS: dict[str, Any] = {
    "chat": (ChatCompletionRequest, ChatCompletionResponse),
    "responses": (ResponsesRequest, ResponsesResponse),
    "messages": (MessagesRequest, MessagesResponse),
}
CALL_ID = re.compile(r"call_(\d\d)_[A-Za-z0-9]{24}\Z")


def normal(value: Any) -> Any:
    """Blank what is not fixed: times and the random part of call ids."""
    if isinstance(value, dict):
        times = ("created", "created_at", "completed_at")
        return {
            key: 0 if key in times and item is not None else normal(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [normal(item) for item in value]
    return CALL_ID.sub(r"call_\1_X", value) if isinstance(value, str) else value


def delta_place(event: list[Any]) -> tuple[Any, list[Any]] | None:
    """Of an event that carries text: where the text lies, and the event without it."""
    name, payload = event
    payload = json.loads(json.dumps(payload))
    payload.pop("sequence_number", None)
    if name is None and payload["choices"]:
        delta = payload["choices"][0]["delta"]
        if payload["choices"][0]["finish_reason"] or "role" in delta:
            return None
        calls = delta.get("tool_calls")
        if calls and "name" not in calls[0]["function"]:
            text = calls[0]["function"].pop("arguments")
            return text, [name, payload]
        for key in ("content", "reasoning_content"):
            if delta.get(key):
                text = delta[key]
                delta[key] = "text"
                return text, [name, payload]
        return None
    if name == "content_block_delta":
        for key in ("thinking", "text", "partial_json"):
            if key in payload["delta"]:
                return payload["delta"].pop(key), [name, payload]
    if name and name.endswith(".delta"):
        return payload.pop("delta"), [name, payload]
    return None


def joined(events: list[list[Any]]) -> list[list[Any]]:
    """Join deltas of one item that follow each other: their cut is free."""
    out: list[list[Any]] = []
    texts: list[str] = []
    for event in events:
        found = delta_place(event)
        if found is None:
            name, payload = event
            payload = {k: v for k, v in payload.items() if k != "sequence_number"}
            out.append([name, payload])
            texts.append("")
        elif out and out[-1] == found[1]:
            texts[-1] += found[0]
        else:
            out.append(found[1])
            texts.append(found[0])
    return [[*event, text] for event, text in zip(out, texts, strict=True)]


def replay(case: dict[str, Any], options: Any) -> dict[str, Any]:
    request_type, response_type = PROTOCOLS[case["protocol"]]
    request = request_type(case["request"])
    converted = request.convert(options)
    generator = request_type.chunk_generator(converted, "id-1", "model-x")
    processor: StreamProcessor[Any] = StreamProcessor(generator, converted.parsing_options)
    events: list[Any] = []
    finished_before = None
    for index, (kind, *values) in enumerate(case["chunks"]):
        if processor.finished:
            finished_before = index if finished_before is None else finished_before
            continue
        if kind == "ready":
            usage = PromptUsage(prompt_tokens=values[0], prompt_cache_hit_tokens=values[1])
            fingerprint = values[2] if len(values) > 2 else None
            chunk = InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint)
        elif kind == "text":
            chunk = InferenceChunk.text(*values)
        else:
            chunk = InferenceChunk.finish(InferenceFinishReason(values[0]))
        events += processor.push(chunk)
    events += processor.finish()
    response = response_type("id-1", "model-x", 0, 0, 0)
    for event in events:
        response.accumulate(event)
    return {
        "events": [
            [response_type.sse_event_name(event), normal(json.loads(event.to_json()))]
            for event in events
        ],
        "response": normal(json.loads(response.to_json())),
        "done": response_type.sse_done_data(),
        "finished_before": finished_before,
    }


def call_arguments(response: dict[str, Any]) -> list[tuple[str, bool]]:
    """Arguments of all calls, and whether the response says they are incomplete."""
    found = [
        (call["function"]["arguments"], choice["finish_reason"] == "length")
        for choice in response.get("choices", ())
        for call in choice["message"].get("tool_calls", ())
    ]
    found += [
        (item["arguments"], item["status"] == "incomplete")
        for item in response.get("output", ())
        if item["type"] == "function_call"
    ]
    found += [
        (json.dumps(block["input"]), False)
        for block in response.get("content", ())
        if block["type"] == "tool_use"
    ]
    return found


def test_answer_streams_as_recorded(stream_case: dict[str, Any], options_of: Any) -> None:
    got = replay(stream_case, options_of(stream_case))
    assert got["done"] == stream_case["sse_done"]
    assert got["finished_before"] == stream_case.get("finished_before_chunk")
    if stream_case.get("peer_fault"):
        for arguments, is_incomplete in call_arguments(got["response"]):
            assert is_incomplete or isinstance(json.loads(arguments), dict)
        return
    assert got["response"] == stream_case["expect_response"]
    if "expect_events" in stream_case:
        assert joined(got["events"]) == joined(stream_case["expect_events"])


def test_sequence_numbers_of_responses_have_no_gap(
    stream_case: dict[str, Any], options_of: Any
) -> None:
    if stream_case["protocol"] != "responses":
        return
    events = replay(stream_case, options_of(stream_case))["events"]
    numbers = [payload["sequence_number"] for _, payload in events]
    assert numbers == list(range(len(numbers)))
