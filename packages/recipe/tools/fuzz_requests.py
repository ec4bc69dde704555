"""Generated request bodies, through both codecs: the same prompt, or the same refusal."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import deepseek_recipe
from fuzz_bodies import generate
from fuzz_pieces import MODELS

import deepinfer_recipe

REQUESTS = {
    "chat": "ChatCompletionRequest",
    "responses": "ResponsesRequest",
    "messages": "MessagesRequest",
}


def conversion_options(codec: Any, wanted: dict[str, Any]) -> Any:
    options = codec.ConversionOptions()
    for name, value in wanted.items():
        if name == "model_aliases":
            for alias, version in value.items():
                options = options.with_model_alias(alias, getattr(codec.ModelVersion, version))
            continue
        if name.endswith("web_search"):
            value = getattr(codec.WebSearchBehavior, value)
        elif name == "reasoning_content_behavior":
            value = getattr(codec.ReasoningContentBehavior, value)
        options = getattr(options, f"with_{name}")(value)
    return options


def shown(value: Any) -> str:
    """Name of an enum member of either codec."""
    return str(value).rpartition(".")[2]


def described_tool(tool: Any) -> Any:
    return [tool.name, tool.description, tool.parameters, tool.strict, tool.defer_loading]


def described_message(message: Any) -> Any:
    calls = message.tool_calls
    tools = getattr(message, "tools", None)
    return {
        "role": message.role,
        "content": message.content,
        "reasoning": message.reasoning_content,
        "calls": calls and [[c.id, c.name, c.arguments] for c in calls],
        "answers": message.tool_call_id,
        "prefix": message.prefix,
        "sources": [[s.kind, s.detail, s.path, s.url, s.data_url] for s in message.image_sources],
        "tools": tools and [described_tool(tool) for tool in tools],
    }


def outcome(codec: Any, protocol: str, body: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Everything a caller can see of the conversion of one body."""
    options = conversion_options(codec, wanted)
    kind = getattr(codec, REQUESTS[protocol])
    try:
        request = kind(json.dumps(body) if isinstance(body, dict) else str(body))
    except ValueError as error:
        return {"rejected": "parse", "text": str(error)}
    seen: dict[str, Any] = {"model": request.model}
    if protocol == "responses":
        echo = request.echo()
        seen["echo"] = [
            echo.instructions,
            echo.max_output_tokens,
            echo.temperature,
            echo.top_p,
            echo.top_logprobs,
            echo.user,
        ]
        try:
            names = request.namespace_tool_map(options)
            seen["namespaces"] = {name: list(pair) for name, pair in names.items()}
        except codec.ConversionError as error:
            seen["namespaces"] = str(error)
    try:
        converted = request.convert(options)
    except codec.ConversionError as error:
        return {"rejected": "convert", "status": error.status_code, "text": error.body}
    version = shown(converted.model_version)
    encoding = (
        codec.DeepseekV41Encoding() if version.endswith("Flash") else codec.DeepseekV4Encoding()
    )
    conversation, inference = converted.conversation, converted.inference_options
    parsing, constraint = converted.parsing_options, inference.output_constraint
    rendered = encoding.render_conversation(conversation)
    return {
        **seen,
        "version": version,
        "stream": converted.stream,
        "prompt": rendered.prompt,
        "ranges": [list(pair) for pair in rendered.special_ranges],
        "sources": len(rendered.image_sources),
        "conversation": [
            conversation.thinking_mode,
            conversation.reasoning_effort,
            conversation.tool_choice,
            conversation.response_format,
            conversation.response_schema,
            conversation.response_regex,
            [described_tool(tool) for tool in conversation.tools],
        ],
        "messages": [described_message(message) for message in conversation.messages],
        "inference": [
            inference.max_tokens,
            round(inference.temperature, 6),
            round(inference.top_p, 6),
            inference.logprobs,
            inference.top_logprobs,
            inference.seed,
            constraint and [constraint.kind, constraint.schema],
        ],
        "parsing": [
            parsing.parse_tool_calls,
            parsing.starts_in_tool_calls,
            parsing.parse_json_output,
            parsing.thinking_initial_stage and shown(parsing.thinking_initial_stage),
            list(parsing.stop_sequences),
        ],
    }


@cache
def patch_texts(codec: Any) -> list[tuple[str, str]]:
    """The texts of the apply_patch tool, for both models: each codec words them in its own way."""
    texts: list[tuple[str, str]] = []
    for model in MODELS:
        body = {"model": model, "input": "x", "tools": [{"type": "custom", "name": "apply_patch"}]}
        converted = codec.ResponsesRequest(body).convert(codec.ConversionOptions())
        [tool] = converted.conversation.tools
        texts.append((tool.description, tool.parameters["properties"]["input"]["description"]))
    return texts


def neutral(codec: Any, seen: dict[str, Any]) -> dict[str, Any]:
    """An outcome without the texts of apply_patch and the offsets behind them."""
    text = json.dumps(seen, ensure_ascii=False)
    for texts in patch_texts(codec):
        for own, mark in zip(texts, ("PATCH", "INPUT"), strict=True):
            once = json.dumps(own, ensure_ascii=False)[1:-1]
            twice = json.dumps(once, ensure_ascii=False)[1:-1]
            text = text.replace(twice, mark).replace(once, mark)
    cleaned = json.loads(text)
    if "PATCH" in cleaned.get("prompt", ""):
        del cleaned["ranges"]
    return cleaned


def explained(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The decision behind a difference, if there is one."""
    if ours.get("rejected") == "parse" and theirs.get("rejected") == "parse":
        return "equal"  # the wording of a parse error is free
    if ours.get("rejected") == "parse":
        if "got a list" in ours["text"]:
            return "a list in place of an object is refused"
        if re.search(r"unknown (type|role) `|got -?\d+ \(at (type|role)\)", ours["text"]):
            return "a number in place of a kind's name is refused"
    if (ours.get("rejected"), theirs.get("rejected")) == ("convert", "convert"):
        return "another wording of the same refusal"
    return None


def case(rng: random.Random) -> tuple[str | None, Any]:
    """One generated request; the category of the difference (None when equal) and the details."""
    protocol, body, options = generate(rng)
    ours = neutral(deepinfer_recipe, outcome(deepinfer_recipe, protocol, body, options))
    theirs = neutral(deepseek_recipe, outcome(deepseek_recipe, protocol, body, options))
    if ours == theirs:
        return None, None
    category = explained(ours, theirs)
    if category == "equal":
        return None, None
    differing = {
        key: [ours.get(key), theirs.get(key)]
        for key in ours | theirs
        if ours.get(key) != theirs.get(key)
    }
    detail = {"protocol": protocol, "body": body, "options": options, "ours, theirs": differing}
    return category or "unexplained", detail
