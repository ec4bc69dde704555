"""Every recorded request converts and renders to the recorded bytes, or fails as recorded."""

from __future__ import annotations

import json
from typing import Any

from deepinfer_recipe import (
    ChatCompletionRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
    MessagesRequest,
    ResponsesRequest,
)

REQUESTS = {
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
# Two texts of the apply_patch tool are our own; the corpus marks their places.
OWN_TEXTS = ("{{APPLY_PATCH_DESCRIPTION}}", "{{APPLY_PATCH_INPUT_DESCRIPTION}}")


def picture(source: Any) -> dict[str, Any]:
    place = {"url": source.url} if source.kind == "url" else {"data_url": source.data_url}
    return {"kind": source.kind, "detail": source.detail, "path": source.path, **place}


def tool(definition: Any) -> dict[str, Any]:
    names = ("name", "description", "parameters", "strict", "defer_loading")
    return {name: getattr(definition, name) for name in names}


def message(value: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"role": value.role, "content": value.content}
    if value.role == "assistant":
        calls = value.tool_calls
        out["reasoning_content"] = value.reasoning_content
        out["tool_calls"] = calls and [
            {"id": c.id, "name": c.name, "arguments": c.arguments} for c in calls
        ]
        out["prefix"] = value.prefix
    if value.tool_call_id is not None:
        out["tool_call_id"] = value.tool_call_id
    if value.image_sources:
        out["image_sources"] = [picture(source) for source in value.image_sources]
    if value.role == "system" and value.tools:
        out["tools"] = [tool(definition) for definition in value.tools]
    return out


def outcome(case: dict[str, Any], options: Any) -> dict[str, Any]:
    try:
        request = REQUESTS[case["protocol"]](case["request"])
    except ValueError:
        return {"rejected_at": "parse"}
    namespaces = {}
    if isinstance(request, ResponsesRequest):
        try:
            namespaces = request.namespace_tool_map(options)
        except ConversionError:
            namespaces = {}
    try:
        converted = request.convert(options)
    except ConversionError as error:
        body = json.loads(error.body)
        return {"rejected_at": "convert", "error": {"status": error.status_code, "body": body}}
    encoding = DeepseekV41Encoding() if case["encoding"] == "v41" else DeepseekV4Encoding()
    rendered = encoding.render_conversation(converted.conversation)
    inference, parsing = converted.inference_options, converted.parsing_options
    constraint, stage = inference.output_constraint, parsing.thinking_initial_stage
    conversation = converted.conversation
    return {
        "namespace_tool_map": {name: list(pair) for name, pair in namespaces.items()},
        "model_version": converted.model_version.name,
        "stream": converted.stream,
        "prompt": rendered.prompt,
        "special_ranges": [list(pair) for pair in rendered.special_ranges],
        "image_sources": [picture(source) for source in rendered.image_sources],
        "thinking_mode": conversation.thinking_mode,
        "reasoning_effort": conversation.reasoning_effort,
        "tool_choice": conversation.tool_choice,
        "response_format": conversation.response_format,
        "inference": {
            "max_tokens": inference.max_tokens,
            "temperature": round(inference.temperature or 0, 6),
            "top_p": round(inference.top_p or 0, 6),
            "logprobs": inference.logprobs,
            "top_logprobs": inference.top_logprobs,
            "seed": inference.seed,
            "output_constraint": constraint
            and {"kind": constraint.kind, "schema": constraint.schema},
        },
        "parsing": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "thinking_initial_stage": stage and stage.name,
            "stop_sequences": parsing.stop_sequences,
        },
        "messages": [message(value) for value in conversation.messages],
    }


def own_texts_marked(value: Any) -> Any:
    """Put the corpus's markers where our own tool texts stand."""
    request = ResponsesRequest(
        {
            "model": "DeepSeek-V4.1-Flash",
            "input": "x",
            "tools": [{"type": "custom", "name": "apply_patch"}],
        }
    )
    definition = request.convert(ConversionOptions())
    own = definition.conversation.tools[0]
    texts = (own.description, own.parameters["properties"]["input"]["description"])
    text = json.dumps(value, ensure_ascii=False)
    for ours, mark in zip(texts, OWN_TEXTS, strict=True):
        once = json.dumps(ours, ensure_ascii=False)[1:-1]
        twice = json.dumps(once, ensure_ascii=False)[1:-1]
        text = text.replace(twice, mark).replace(once, mark)
    return json.loads(text)


def test_request_converts_as_recorded(convert_case: dict[str, Any], options_of: Any) -> None:
    expected = dict(convert_case["expect"])
    got = outcome(convert_case, options_of(convert_case))
    if expected.get("rejected_at") == "parse":
        assert got == {"rejected_at": "parse"}  # the text is free
        return
    if "prompt" in expected:
        expected.setdefault("namespace_tool_map", {})
        if OWN_TEXTS[0] in expected["prompt"]:
            got = own_texts_marked(got)
            # Offsets behind a marker do not count.
            del got["special_ranges"], expected["special_ranges"]
    assert got == expected


def test_special_ranges_hold_exactly_the_special_tokens(
    convert_case: dict[str, Any], options_of: Any
) -> None:
    got = outcome(convert_case, options_of(convert_case))
    position = 0
    for start, end in got.get("special_ranges", ()):
        assert position <= start < end
        assert got["prompt"][start:end][0] in "<｜"
        position = end
    assert position <= len(got.get("prompt", ""))
