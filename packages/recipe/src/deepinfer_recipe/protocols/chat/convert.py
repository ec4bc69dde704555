"""Conversion of Chat Completions requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from deepinfer_recipe.base.errors import ConversionError, RequestParseError
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import (
    AssistantMessage,
    LatestReminderMessage,
    Message,
    ToolMessage,
    UserMessage,
)
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.conversation.tool_types import ToolCall, ToolDefinition
from deepinfer_recipe.documents import reader as documents
from deepinfer_recipe.prompts.prompt_builder import UNSUPPORTED_IMAGE
from deepinfer_recipe.protocols.chat import body as wire
from deepinfer_recipe.protocols.chat.thinking_switch import asked_thinking
from deepinfer_recipe.protocols.common import pictures
from deepinfer_recipe.protocols.common.builder import (
    AnswerFormat,
    JsonSchemaFormat,
    RegexFormat,
    RequestBuilder,
    Sampling,
    fill_reasoning,
    finish,
    mentions_json,
    resolve_model,
    resolve_thinking,
)
from deepinfer_recipe.protocols.common.content import JoinedContent
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.common.tools import (
    Allowed,
    Choice,
    Forced,
    check_name,
    check_unique,
    checked_tool,
)


def check_profile(body: wire.ChatBody, policy: Policy) -> None:
    """Refuse at parse time what only the extended profile knows."""
    for index, turn in enumerate(body.messages):
        if turn.role == "developer" and not policy.accepts_developer_role:
            raise RequestParseError(
                "invalid request body: unknown role `developer`, expected one of `system`, "
                f"`user`, `assistant`, `tool`, `latest_reminder` (at messages[{index}].role)",
                param=f"messages[{index}].role",
            )
    if isinstance(body.tool_choice, wire.AllowedToolsChoice) and not policy.accepts_allowed_tools:
        raise RequestParseError(
            "invalid request body: unknown tool_choice type `allowed_tools`, expected `function`",
            param="tool_choice",
        )


def convert(body: wire.ChatBody, options: ConversionOptions, policy: Policy) -> ConversationRequest:
    """Convert a parsed body. Raises `ConversionError`."""
    version = resolve_model(body.model, options, policy)
    asked = (body.thinking.type if body.thinking else None, body.reasoning_effort)
    if policy.reads_thinking_switches:
        asked = asked_thinking(body)
    thinking, effort = resolve_thinking(*asked, default=options.default_thinking_mode)
    builder = RequestBuilder(
        policy=policy,
        options=options,
        version=version,
        thinking=thinking,
        effort=effort,
        sampling=_sampling(body, policy),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        user=_end_user(body, policy),
    )
    declared = body.tools or []
    for index, tool in enumerate(declared):
        if not tool.function.definitions:
            check_name(tool.function.name, f"tools[{index}].function.name")
    if not body.messages:
        raise ConversionError("Empty input messages", param="messages")
    if body.stream_options is not None and not body.stream:
        raise ConversionError(
            "stream_options should be set along with stream = true", param="stream_options"
        )
    builder.declares_tools = bool(declared)
    builder.choice = _choice(body.tool_choice)
    builder.messages = _messages(body.messages, builder)
    _check_prefix(body)
    fill_reasoning(builder, "reasoning_content")
    builder.answer = _answer(body.response_format)
    builder.names_format = body.response_format is not None
    if builder.answer == "json_object":
        if not mentions_json(builder.messages):
            raise ConversionError(
                "Prompt must contain the word 'json' in some form to use 'response_format' of "
                "type 'json_object'.",
                param="response_format",
            )
        if builder.messages[-1].prefix:
            raise ConversionError(
                "response_format json_object should not be used with prefix",
                param="response_format",
            )
    if builder.choice != "none":
        builder.tools = _tools(declared, policy)
    return finish(builder)


def _end_user(body: wire.ChatBody, policy: Policy) -> str | None:
    for name, value in (("user_id", body.user_id), ("user", body.user)):
        if isinstance(value, str):
            return value
        if value is not None and policy.checks_end_user:
            # passed over, two end users would share what is kept apart by this name
            raise ConversionError(
                f"Invalid {name} value, expected a string, got {value!r}", param=name
            )
    return None


def _sampling(body: wire.ChatBody, policy: Policy) -> Sampling:
    n = 1 if body.n is None else body.n
    most = policy.max_choices
    if most == 1 and n != 1:
        raise ConversionError("Invalid n value (currently only n = 1 is supported)", param="n")
    if not 1 <= n <= most:
        raise ConversionError(f"Invalid n value, the valid range of n is [1, {most}]", param="n")
    max_tokens = body.max_tokens
    alias = body.max_completion_tokens
    if policy.accepts_max_completion_tokens and max_tokens is None and alias is not None:
        if type(alias) is not int or alias < 0:
            raise ConversionError(
                f"Invalid max_completion_tokens value, expected a positive integer, got {alias!r}",
                param="max_completion_tokens",
            )
        max_tokens = alias
    return Sampling(
        temperature=body.temperature,
        top_p=body.top_p,
        max_tokens=max_tokens,
        stop=body.stop,
        seed=body.seed,
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
        n=n,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
    )


def _check_prefix(body: wire.ChatBody) -> None:
    last = len(body.messages) - 1
    for index, turn in enumerate(body.messages):
        if turn.role == "assistant" and turn.prefix and index != last:
            raise ConversionError(
                "Invalid completion message: prefix set true with message which is not final "
                "message or message role is not assistant",
                param=f"messages[{index}].prefix",
            )


def _parts(
    content: wire.Content, place: str, builder: RequestBuilder
) -> Iterator[str | ImageSource]:
    if isinstance(content, str):
        yield content
        return
    for index, part in enumerate(content):
        if isinstance(part, wire.TextPart):
            yield part.text
        elif (
            isinstance(part, wire.FilePart)
            and builder.policy.reads_documents
            and (text := _document(part, f"{place.lstrip('.')}.content[{index}]", builder))
            is not None
        ):
            yield text
        elif not builder.version.prompt_format.has_pictures:
            yield UNSUPPORTED_IMAGE
        elif isinstance(part, wire.ImagePart):
            yield pictures.from_reference(part.image_url.url, part.image_url.detail, place)
        else:
            yield pictures.from_file(part.file_id, part.file_data, place)


def _document(part: wire.FilePart, place: str, builder: RequestBuilder) -> str | None:
    """A file as text of the prompt; None if it is not a document but the data URL of a picture.

    OpenAI's clients put the fields under `file`, the reference's beside the type.
    """
    fields = part.file if part.file is not None else part.model_dump()
    if not isinstance(fields, dict):
        raise ConversionError(f"{place}.file: expected an object", param=f"{place}.file")
    data, title = fields.get("file_data"), fields.get("filename")
    if fields.get("file_id") is not None or not isinstance(data, str):
        raise ConversionError(
            f"{place}: expected `file_data`, a data URL or base64; files kept on a server "
            "(`file_id`) are not supported",
            param=place,
        )
    if documents.is_data_url(data) and documents.data_url_type(data).startswith("image/"):
        if part.file is not None:
            raise ConversionError(f"{place}: pass a picture as an `image_url` part", param=place)
        return None
    return builder.documents.from_encoded(data, title if isinstance(title, str) else None, place)


def _user(content: wire.Content, index: int, builder: RequestBuilder) -> UserMessage:
    if isinstance(content, str):
        return UserMessage(content)
    return _joined(content, index, builder).user()


def _joined(content: wire.Content, index: int, builder: RequestBuilder) -> JoinedContent:
    joined = JoinedContent(
        builder.version.prompt_format.has_pictures,
        builder.options.special_tokens.token(SpecialToken.Image),
    )
    return joined.extend(_parts(content, f".messages[{index}]", builder))


def _messages(turns: Sequence[wire.Turn], builder: RequestBuilder) -> list[Message]:
    messages: list[Message] = []
    index = 0
    while index < len(turns):
        turn = turns[index]
        # By role, not `isinstance`: the checks that pydantic adds to it take longer than the rest.
        if turn.role == "assistant":
            messages.append(_assistant(turn, index, builder))
            if turn.tool_calls:
                results = _results(turns, index, builder)
                messages += results
                index += len(results)
        elif turn.role == "tool":
            raise ConversionError(
                "Messages with role 'tool' must be a response to a preceding message with "
                "'tool_calls'",
                param=f"messages[{index}]",
            )
        elif turn.role == "latest_reminder":
            messages.append(LatestReminderMessage(turn.content))
        elif turn.role == "user":
            messages.append(_user(turn.content, index, builder))
        else:
            content = _joined(turn.content, index, builder)
            if content.text:
                messages.append(content.system())
        index += 1
    return messages


def _assistant(turn: wire.AssistantTurn, index: int, builder: RequestBuilder) -> AssistantMessage:
    content, calls = turn.content, turn.tool_calls
    if content is None and calls is None:
        raise ConversionError(
            "Invalid assistant message: content or tool_calls must be set",
            param=f"messages[{index}]",
        )
    history = None if calls is None else _calls(calls, index)
    if content is not None and not isinstance(content, str):
        place = f"messages[{index}]"
        joined = JoinedContent(True, "").extend(_parts(content, f".{place}", builder))
        if joined.sources:
            raise ConversionError("Image in assistant message is not supported", param=place)
        content = joined.text
    return AssistantMessage(content or "", turn.reasoning_content, history, bool(turn.prefix))


def _calls(calls: Sequence[wire.Call], index: int) -> list[ToolCall]:
    """The calls of the assistant turn at `index`."""
    param = f"messages[{index}].tool_calls"
    if not calls:
        raise ConversionError(
            f"Invalid '{param}': empty array. Expected an array with minimum length 1, but got "
            "an empty array instead.",
            param=param,
        )
    seen: set[str] = set()
    history: list[ToolCall] = []
    for call in calls:
        if call.id in seen:
            raise ConversionError(
                f"Duplicate value for 'tool_call_id' of {call.id} in message[{index}]",
                param=param,
            )
        seen.add(call.id)
        history.append(ToolCall(call.id, call.function.name, call.function.arguments))
    return history


def _results(turns: Sequence[wire.Turn], index: int, builder: RequestBuilder) -> list[ToolMessage]:
    """The tool messages that answer the calls of the assistant turn at `index`."""
    turn = turns[index]
    calls = turn.tool_calls if turn.role == "assistant" else None
    wanted = [call.id for call in calls or ()]
    known = set(wanted)
    answered: dict[str, ToolMessage] = {}
    for place in range(index + 1, index + 1 + len(wanted)):
        result = turns[place] if place < len(turns) else None
        if result is None or result.role != "tool":
            raise ConversionError(
                "An assistant message with 'tool_calls' must be followed by tool messages "
                "responding to each 'tool_call_id'. (insufficient tool messages following "
                "tool_calls message)",
                param=f"messages[{index}].tool_calls",
            )
        if result.tool_call_id in answered:
            raise ConversionError(
                f"Duplicate value for 'tool_call_id' of {result.tool_call_id} in message[{place}]",
                param=f"messages[{place}].tool_call_id",
            )
        if result.tool_call_id not in known:
            raise ConversionError(
                "An assistant message with 'tool_calls' must be followed by tool messages "
                "responding to each 'tool_call_id', The following tool_call_ids did not have "
                f"response messages: {result.tool_call_id}",
                param=f"messages[{place}].tool_call_id",
            )
        call_id = result.tool_call_id
        answered[call_id] = (
            ToolMessage(result.content, call_id)
            if isinstance(result.content, str)
            else _joined(result.content, place, builder).tool(call_id)
        )
    return list(answered.values())


def _answer(requested: wire.ResponseFormat | None) -> AnswerFormat:
    if isinstance(requested, wire.JsonSchemaFormat):
        schema = requested.json_schema
        return JsonSchemaFormat(schema.schema_, bool(schema.strict))
    if isinstance(requested, wire.RegexFormat):
        return RegexFormat(requested.regex)
    return "json_object" if isinstance(requested, wire.JsonObjectFormat) else "text"


def _choice(
    requested: Literal["none", "auto", "required"]
    | wire.FunctionChoice
    | wire.AllowedToolsChoice
    | None,
) -> Choice:
    if isinstance(requested, wire.FunctionChoice):
        return Forced(requested.function.name)
    if isinstance(requested, wire.AllowedToolsChoice):
        allowed = requested.allowed_tools
        return Allowed(tuple(t.function.name for t in allowed.tools), allowed.mode)
    return requested or "auto"


def _tools(declared: Sequence[wire.Tool], policy: Policy) -> list[ToolDefinition]:
    check_unique([tool.function.name for tool in declared])
    tools: list[ToolDefinition] = []
    for index, tool in enumerate(declared):
        function = tool.function
        definition = function.definitions.get(policy.name)
        if definition is None:
            definition = function.definitions[policy.name] = checked_tool(
                function.name,
                function.description,
                function.parameters,
                f"tools[{index}].function.parameters",
                strict=function.strict,
                policy=policy,
            )
        tools.append(definition)
    return tools
