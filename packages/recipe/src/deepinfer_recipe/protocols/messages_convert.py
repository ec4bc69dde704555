"""Conversion of Messages requests."""

from __future__ import annotations

from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.errors import ConversionError
from deepinfer_recipe.options import ConversionOptions, Profile
from deepinfer_recipe.protocols import messages_body as wire
from deepinfer_recipe.protocols.draft import (
    AnswerFormat,
    Draft,
    JsonSchemaFormat,
    Sampling,
    fill_reasoning,
    finish,
    resolve_model,
    resolve_thinking,
)
from deepinfer_recipe.protocols.messages_history import History
from deepinfer_recipe.protocols.messages_tools import client_tools, tool_choice


def convert(
    body: wire.MessagesBody, options: ConversionOptions, profile: Profile
) -> ConversationRequest:
    """Convert a parsed body. Raises `ConversionError`."""
    version = resolve_model(body.model, options, profile)
    thinking, effort = resolve_thinking(
        body.thinking.type if body.thinking else None,
        body.output_config.effort if body.output_config else None,
        default=options.default_thinking_mode,
    )
    draft = Draft(
        profile=profile,
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
    draft.tools, dropped = client_tools(body.tools or [], draft, checks_schemas=not is_off)
    if not body.messages:
        raise ConversionError("messages: at least one message is required", param="messages")
    draft.choice = tool_choice(body, dropped, profile)
    # A search that is dropped counts as declared where turns must bring their thinking back.
    draft.declares_tools = bool(body.tools if profile == "parity" else draft.tools)
    draft.messages = History(draft).convert(body)
    fill_reasoning(draft, "content[].thinking")
    draft.answer = _answer(body, profile)
    return finish(draft)


def _answer(body: wire.MessagesBody, profile: Profile) -> AnswerFormat:
    requested = body.output_config.format if body.output_config else None
    if profile == "parity" or requested is None:
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
