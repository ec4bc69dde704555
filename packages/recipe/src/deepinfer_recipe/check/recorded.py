"""Recorded cases against this library: the same prompt, the same answer, the same refusal."""

from __future__ import annotations

import json
import re
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.check.cases import Case
from deepinfer_recipe.check.rules import Problems, shown
from deepinfer_recipe.conversation.inference import (
    InferenceChunk,
    InferenceFinishReason,
    PromptUsage,
)
from deepinfer_recipe.prompts.encoding import encoding_for
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.protocols.chat.events import ChatCompletionResponse
from deepinfer_recipe.protocols.chat.request import ChatCompletionRequest
from deepinfer_recipe.protocols.common.options import (
    ConversionOptions,
    ReasoningContentBehavior,
    WebSearchBehavior,
)
from deepinfer_recipe.protocols.messages.events import MessagesResponse
from deepinfer_recipe.protocols.messages.request import MessagesRequest
from deepinfer_recipe.protocols.responses.events import ResponsesResponse
from deepinfer_recipe.protocols.responses.request import ResponsesRequest
from deepinfer_recipe.serving.stream import StreamProcessor

_REQUESTS: dict[str, Any] = {
    "chat": ChatCompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
}
_RESPONSES: dict[str, Any] = {
    "chat": ChatCompletionResponse,
    "responses": ResponsesResponse,
    "messages": MessagesResponse,
}
_ENCODINGS: dict[str | None, ModelVersion] = {
    "v4": ModelVersion.DeepseekV4Pro,
    "v41": ModelVersion.DeepseekV41Flash,
}
_CALL_ID = re.compile(r"call_(\d\d)_(?:ET_)?[A-Za-z0-9]{24}\Z")
_TIMES = ("created", "created_at", "completed_at")
_OWN_TEXT = "{{APPLY_PATCH"


def options_of(case: Case) -> ConversionOptions:
    """The options that a case was recorded with."""
    options = ConversionOptions()
    for name, value in case.fields.get("options", {}).items():
        if name == "model_aliases":
            for alias, version in value.items():
                options = options.with_model_alias(alias, ModelVersion(version))
            continue
        if name.endswith("web_search"):
            value = WebSearchBehavior(value)
        elif name == "reasoning_content_behavior":
            value = ReasoningContentBehavior(value)
        options = getattr(options, f"with_{name}")(value)
    return options


def check_conversion(case: Case) -> Problems:
    """Prompt, ranges, sampling, or the refusal."""
    problems, expect = Problems(), case.fields["expect"]
    got: dict[str, Any]
    try:
        request = _REQUESTS[case.protocol](case.request)
    except ValueError:
        got = {"rejected_at": "parse"}
    else:
        try:
            got = _converted(request.convert(options_of(case)), case.fields.get("encoding"))
        except ConversionError as error:
            got = {
                "rejected_at": "convert",
                "error": {"status": error.status_code, "body": json.loads(error.body)},
            }
    names = ["rejected_at", "prompt", "special_ranges", "inference", "stream"]
    if expect.get("rejected_at") == "convert":
        names.append("error")
    if _OWN_TEXT in json.dumps(expect):
        names = ["rejected_at", "stream"]  # its prompt holds texts that are each codec's own
    for name in names:
        wanted, found = expect.get(name), got.get(name)
        problems.need(found == wanted, f"{name}: expected {shown(wanted)}, got {shown(found)}")
    return problems


def _converted(request: Any, encoding: str | None) -> dict[str, Any]:
    version: ModelVersion = _ENCODINGS.get(encoding) or request.model_version
    rendered = encoding_for(version).render_conversation(request.conversation)
    inference = request.inference_options
    constraint = inference.output_constraint
    return {
        "prompt": rendered.prompt,
        "special_ranges": [list(pair) for pair in rendered.special_ranges],
        "stream": request.stream,
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
    }


def _chunk(kind: str, values: list[Any]) -> InferenceChunk:
    if kind == "ready":
        usage = PromptUsage(prompt_tokens=values[0], prompt_cache_hit_tokens=values[1])
        fingerprint = values[2] if len(values) > 2 else None
        return InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint)
    if kind == "text":
        return InferenceChunk.text(*values)
    return InferenceChunk.finish(InferenceFinishReason(values[0]))


def check_answer(case: Case) -> Problems:
    """The complete response to recorded output."""
    problems = Problems()
    if case.fields.get("peer_fault"):
        return problems  # the record shows a fault that is not to be copied
    request_type, response_type = _REQUESTS[case.protocol], _RESPONSES[case.protocol]
    converted = request_type(case.request).convert(options_of(case))
    generator = request_type.chunk_generator(converted, "id-1", "model-x")
    processor: StreamProcessor[Any] = StreamProcessor(generator, converted.parsing_options)
    response = response_type("id-1", "model-x", 0, 0, 0)
    for kind, *values in case.fields["chunks"]:
        if not processor.finished:
            for event in processor.push(_chunk(kind, values)):
                response.accumulate(event)
    for event in processor.finish():
        response.accumulate(event)
    got, wanted = _neutral(response.to_dict()), case.fields["expect_response"]
    problems.need(got == wanted, f"expected the response {shown(wanted)}, got {shown(got)}")
    return problems


def _neutral(value: Any) -> Any:
    """Without what is not fixed: times, and the random part of call ids."""
    if isinstance(value, dict):
        return {
            key: 0 if key in _TIMES and inner is not None else _neutral(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_neutral(inner) for inner in value]
    return _CALL_ID.sub(r"call_\1_X", value) if isinstance(value, str) else value
