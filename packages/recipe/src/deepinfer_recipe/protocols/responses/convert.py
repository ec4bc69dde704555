"""Conversion of Responses requests."""

from __future__ import annotations

from deepinfer_recipe.base.errors import ConversionError, RequestParseError
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.conversation.server_tools import ServerTool
from deepinfer_recipe.protocols.common.builder import (
    AnswerFormat,
    JsonSchemaFormat,
    RequestBuilder,
    Sampling,
    fill_reasoning,
    finish,
    mentions_json,
    resolve_model,
    resolve_thinking,
)
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.options import ConversionOptions, WebSearchBehavior
from deepinfer_recipe.protocols.common.tools import (
    Allowed,
    Choice,
    Forced,
    check_unique,
)
from deepinfer_recipe.protocols.common.web_search import WEB_SEARCH, server_tool
from deepinfer_recipe.protocols.responses import body as wire
from deepinfer_recipe.protocols.responses.items import History, ParsedResponses
from deepinfer_recipe.protocols.responses.tools import definitions


def check_profile(body: wire.ResponsesBody, policy: Policy) -> None:
    """Refuse at parse time what only the extended profile knows."""
    if not policy.accepts_allowed_tools and isinstance(body.tool_choice, wire.AllowedToolsChoice):
        raise RequestParseError(
            "invalid request body: unknown tool_choice type `allowed_tools`, expected one of "
            "`function`, `custom`, `web_search` (at tool_choice.type)",
            param="tool_choice.type",
        )


def convert(
    parsed: ParsedResponses, options: ConversionOptions, policy: Policy
) -> ConversationRequest:
    """Convert a parsed body. Raises `ConversionError`."""
    body = parsed.body
    wants_store = policy.uses_response_store and body.previous_response_id is not None
    if wants_store and not parsed.continues:
        raise ConversionError(
            "previous_response_id is not supported: this server keeps no responses; send the "
            "whole history in input",
            param="previous_response_id",
        )
    version = resolve_model(body.model, options, policy)
    thinking, effort = resolve_thinking(
        None,
        body.reasoning.effort if body.reasoning else None,
        default=options.default_thinking_mode,
    )
    builder = RequestBuilder(
        policy=policy,
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
    declared = definitions(parsed.tools, form, options, policy, checks_schemas=False)
    builder.choice = _choice(body, options, policy)
    builder.messages, found = History(builder).convert(parsed)
    builder.declares_tools = bool(declared or found)
    fill_reasoning(builder, "reasoning_text")
    if builder.choice != "none":
        builder.tools = definitions(parsed.tools, form, options, policy) + found
        check_unique([tool.name for tool in builder.tools])
        builder.server_tools = _server_tools(parsed, builder)
    builder.answer = _answer(body)
    builder.names_format = builder.answer != "text"
    if builder.answer == "json_object" and not mentions_json(builder.messages):
        raise ConversionError(
            "Response input messages must contain the word 'json' in some form to use "
            "'text.format' of type 'json_object'.",
            param="text.format",
        )
    return finish(builder)


def _server_tools(parsed: ParsedResponses, builder: RequestBuilder) -> dict[str, ServerTool]:
    """The declared tools that the server runs itself."""
    runs = builder.options.responses_web_search is WebSearchBehavior.Run
    if not runs or not builder.policy.runs_server_tools:
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


def _choice(body: wire.ResponsesBody, options: ConversionOptions, policy: Policy) -> Choice:
    requested = body.tool_choice
    if isinstance(requested, wire.NamedChoice):
        return Forced(requested.name)
    if isinstance(requested, wire.AllowedToolsChoice):
        return Allowed(tuple(tool.name for tool in requested.tools), requested.mode)
    if isinstance(requested, wire.WebSearchChoice):
        if options.responses_web_search is WebSearchBehavior.Reject:
            raise ConversionError("Server tools are not supported", param="tool_choice")
        runs = options.responses_web_search is WebSearchBehavior.Run and policy.runs_server_tools
        return Forced(WEB_SEARCH) if runs else "auto"
    return requested or "auto"
