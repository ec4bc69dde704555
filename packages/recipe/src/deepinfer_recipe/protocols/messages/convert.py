"""Conversion of Messages requests."""

from __future__ import annotations

from deepinfer_recipe.base.errors import ConversionError, RequestParseError
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.protocols.common.builder import (
    AnswerFormat,
    JsonSchemaFormat,
    RequestBuilder,
    Sampling,
    fill_reasoning,
    finish,
    resolve_model,
    resolve_thinking,
)
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.messages import body as wire
from deepinfer_recipe.protocols.messages.history import History
from deepinfer_recipe.protocols.messages.tools import ToolReader, tool_choice


def check_profile(body: wire.MessagesBody, policy: Policy) -> None:
    """Refuse at parse time what only the extended profile knows."""
    if policy.reads_newer_blocks:
        return
    for index, turn in enumerate(body.messages):
        for position, block in enumerate(turn.content if isinstance(turn.content, list) else ()):
            if isinstance(block, wire.RedactedThinkingBlock | wire.SearchResultBlock):
                place = f"messages[{index}].content[{position}]"
                raise RequestParseError(
                    f"invalid request body: unknown type `{block.type}` (at {place})", param=place
                )


def convert(
    body: wire.MessagesBody, options: ConversionOptions, policy: Policy
) -> ConversationRequest:
    """Convert a parsed body. Raises `ConversionError`."""
    version = resolve_model(body.model, options, policy)
    thinking, effort = resolve_thinking(
        body.thinking.type if body.thinking else None,
        body.output_config.effort if body.output_config else None,
        default=options.default_thinking_mode,
    )
    if body.thinking is None and not policy.messages_think_unasked:
        thinking, effort = False, None
    builder = RequestBuilder(
        policy=policy,
        options=options,
        version=version,
        thinking=thinking,
        effort=effort,
        sampling=Sampling(
            temperature=body.temperature,
            top_p=body.top_p,
            max_tokens=body.max_tokens,
            clamps_max_tokens=True,
            stop=body.stop_sequences,
        ),
        stream=bool(body.stream),
        user=body.metadata.user_id if body.metadata else None,
    )
    is_off = isinstance(body.tool_choice, wire.NoChoice)
    reader = ToolReader(builder, checks_schemas=not is_off)
    builder.tools = reader.read(body.tools or [])
    if not body.messages:
        raise ConversionError("messages: at least one message is required", param="messages")
    builder.choice = tool_choice(body, reader.dropped, policy)
    # A search that is dropped counts as declared where turns must bring their thinking back.
    builder.declares_tools = bool(body.tools if policy.counts_dropped_tools else builder.tools)
    builder.messages = History(builder).convert(body)
    fill_reasoning(builder, "content[].thinking")
    builder.answer = _answer(body, policy)
    return finish(builder)


def _answer(body: wire.MessagesBody, policy: Policy) -> AnswerFormat:
    requested = body.output_config.format if body.output_config else None
    if not policy.enforces_messages_choices or requested is None:
        return "text"
    if not isinstance(requested, dict) or requested.get("type") != "json_schema":
        raise ConversionError(
            "output_config.format: expected an object of type `json_schema` with a `schema`",
            param="output_config.format",
        )
    if "schema" not in requested:
        raise ConversionError(
            "output_config.format: missing field `schema`", param="output_config.format.schema"
        )
    return JsonSchemaFormat(requested["schema"], strict=False)
