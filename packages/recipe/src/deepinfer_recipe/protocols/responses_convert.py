"""Conversion of Responses requests."""

from __future__ import annotations

from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.errors import ConversionError, RequestParseError
from deepinfer_recipe.options import ConversionOptions, Profile, WebSearchBehavior
from deepinfer_recipe.protocols import responses_body as wire
from deepinfer_recipe.protocols.draft import (
    AnswerFormat,
    Draft,
    JsonSchemaFormat,
    Sampling,
    fill_reasoning,
    finish,
    mentions_json,
    resolve_model,
    resolve_thinking,
)
from deepinfer_recipe.protocols.responses_items import History, ParsedResponses
from deepinfer_recipe.protocols.responses_tools import definitions
from deepinfer_recipe.protocols.tools import (
    Allowed,
    Choice,
    Forced,
    check_unique,
)
from deepinfer_recipe.protocols.web_search import WEB_SEARCH, server_tool
from deepinfer_recipe.server_tools import ServerTool


def check_profile(body: wire.ResponsesBody, profile: Profile) -> None:
    """Refuse at parse time what only the extended profile knows."""
    if profile == "parity" and isinstance(body.tool_choice, wire.AllowedToolsChoice):
        raise RequestParseError(
            "invalid request body: unknown tool_choice type `allowed_tools`, expected one of "
            "`function`, `custom`, `web_search` (at tool_choice.type)",
            param="tool_choice.type",
        )


def convert(
    parsed: ParsedResponses, options: ConversionOptions, profile: Profile
) -> ConversationRequest:
    """Convert a parsed body. Raises `ConversionError`."""
    body = parsed.body
    if profile == "extended" and body.previous_response_id is not None and not parsed.continues:
        raise ConversionError(
            "previous_response_id is not supported: this server keeps no responses; send the "
            "whole history in input",
            param="previous_response_id",
        )
    version = resolve_model(body.model, options, profile)
    thinking, effort = resolve_thinking(
        None,
        body.reasoning.effort if body.reasoning else None,
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
            max_tokens=body.max_output_tokens,
            logprobs=body.top_logprobs is not None,
            top_logprobs=body.top_logprobs,
        ),
        stream=bool(body.stream),
        user=body.user,
    )
    form = version.prompt_format
    declared = definitions(parsed.tools, form, options, profile, checks_schemas=False)
    draft.choice = _choice(body, options, profile)
    draft.messages, found = History(draft).convert(parsed)
    draft.declares_tools = bool(declared or found)
    fill_reasoning(draft, "reasoning_text")
    if draft.choice != "none":
        draft.tools = definitions(parsed.tools, form, options, profile) + found
        check_unique([tool.name for tool in draft.tools])
        draft.server_tools = _server_tools(parsed, draft)
    draft.answer = _answer(body)
    draft.names_format = draft.answer != "text"
    if draft.answer == "json_object" and not mentions_json(draft.messages):
        raise ConversionError(
            "Response input messages must contain the word 'json' in some form to use "
            "'text.format' of type 'json_object'.",
            param="text.format",
        )
    return finish(draft)


def _server_tools(parsed: ParsedResponses, draft: Draft) -> dict[str, ServerTool]:
    """The declared tools that the server runs itself."""
    runs = draft.options.responses_web_search is WebSearchBehavior.Run
    if not runs or draft.profile == "parity":
        return {}
    declared = [tool for _, tool in parsed.tools if isinstance(tool, wire.WebSearchTool)]
    if not declared:
        return {}
    declaration = declared[0].model_dump(exclude_unset=True)
    limit = parsed.body.max_tool_calls
    return {WEB_SEARCH: server_tool("openai", declaration, limit, "max_tool_calls")}


def _answer(body: wire.ResponsesBody) -> AnswerFormat:
    requested = body.text.format if body.text else None
    if isinstance(requested, wire.JsonSchemaFormat):
        return JsonSchemaFormat(requested.schema_, bool(requested.strict))
    return "json_object" if isinstance(requested, wire.JsonObjectFormat) else "text"


def _choice(body: wire.ResponsesBody, options: ConversionOptions, profile: Profile) -> Choice:
    requested = body.tool_choice
    if isinstance(requested, wire.NamedChoice):
        return Forced(requested.name)
    if isinstance(requested, wire.AllowedToolsChoice):
        return Allowed(tuple(tool.name for tool in requested.tools), requested.mode)
    if isinstance(requested, wire.WebSearchChoice):
        if options.responses_web_search is WebSearchBehavior.Reject:
            raise ConversionError("Server tools are not supported", param="tool_choice")
        runs = options.responses_web_search is WebSearchBehavior.Run and profile == "extended"
        return Forced(WEB_SEARCH) if runs else "auto"
    return requested or "auto"
