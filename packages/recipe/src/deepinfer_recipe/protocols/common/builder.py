"""From the pieces of any protocol's body to a `ConversationRequest`: the shared rules."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.base.errors import ConversionError, UnknownModelError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.inference import InferenceOptions, OutputConstraint
from deepinfer_recipe.conversation.messages import (
    AssistantMessage,
    Message,
    ReasoningEffort,
    ToolChoice,
    with_thinking,
)
from deepinfer_recipe.conversation.parsing_options import ParsingOptions, ThinkingInitialStage
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.conversation.server_tools import ServerTool
from deepinfer_recipe.conversation.tool_types import ToolDefinition
from deepinfer_recipe.documents.reader import DocumentReader
from deepinfer_recipe.prompts.model_version import ModelVersion
from deepinfer_recipe.prompts.template_model import TargetModel, TemplateModel
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.options import (
    ConversionOptions,
    ReasoningContentBehavior,
)
from deepinfer_recipe.protocols.common.schema_check import require_schema
from deepinfer_recipe.protocols.common.strict_schema import StrictRules
from deepinfer_recipe.protocols.common.tools import (
    Choice,
    refuse_forced,
    resolve_choice,
    tool_constraint,
)

ThinkingType: TypeAlias = Literal["enabled", "disabled", "adaptive"]
RequestedEffort: TypeAlias = Literal[
    "none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"
]
MAX_STOP_SEQUENCES = 16

_EFFORTS: dict[RequestedEffort, ReasoningEffort] = {
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "xhigh",
    "ultra": "max",
    "max": "max",
}


@dataclass(frozen=True, slots=True)
class JsonSchemaFormat:
    """An answer that must match a schema."""

    schema: Any
    strict: bool


@dataclass(frozen=True, slots=True)
class RegexFormat:
    """An answer that must match a regular expression."""

    regex: str


AnswerFormat: TypeAlias = Literal["text", "json_object"] | JsonSchemaFormat | RegexFormat


@dataclass(slots=True)
class Sampling:
    """Sampling fields as requested."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    clamps_max_tokens: bool = False
    stop: str | Sequence[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    n: int = 1
    frequency_penalty: float | None = None
    presence_penalty: float | None = None


@dataclass(slots=True)
class RequestBuilder:
    """A request on its way: what the shared rules need from a protocol's body."""

    policy: Policy
    options: ConversionOptions
    version: TargetModel
    thinking: bool
    effort: ReasoningEffort | None
    sampling: Sampling
    messages: list[Message] = field(default_factory=list[Message])
    tools: list[ToolDefinition] = field(default_factory=list[ToolDefinition])
    declares_tools: bool = False
    choice: Choice = "auto"
    answer: AnswerFormat = "text"
    names_format: bool = False
    """Whether the request has a response format, be it that of plain text."""
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    server_tools: dict[str, ServerTool] = field(default_factory=dict[str, ServerTool])
    documents: DocumentReader = field(init=False)

    def __post_init__(self) -> None:
        self.documents = DocumentReader(self.options.document_limits)
        if isinstance(self.version, TemplateModel):
            # Whether a model thinks at all is not for the request to say.
            self.thinking = (self.thinking and self.version.thinks) or self.version.opens_thinking(
                thinking=False
            )
            self.effort = self.effort if self.thinking else None


def resolve_model(model: str, options: ConversionOptions, policy: Policy) -> TargetModel:
    """The version a model name stands for. Unknown names are an error."""
    table = options.model_versions_by_name
    version = table.get(model)
    if version is None:
        message = (
            f"The supported API model names are {', '.join(sorted(table))}, but you passed {model}."
        )
        raise UnknownModelError(message, model, status_code=policy.unknown_model_status)
    return version


def resolve_thinking(
    thinking: ThinkingType | None, effort: RequestedEffort | None, *, default: bool
) -> tuple[bool, ReasoningEffort | None]:
    """Whether to think, and how hard (None when not)."""
    if thinking is not None:
        thinks = thinking != "disabled"
    elif effort is not None:
        thinks = effort != "none"
    else:
        thinks = default
    if not thinks:
        return False, None
    return True, "high" if effort is None or effort == "none" else _EFFORTS[effort]


def as_float32(value: float) -> float:
    """The nearest 32-bit float: requests are compared and sent in that precision."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def check_range(name: str, value: float | None, low: float, high: float, shown: str) -> None:
    """Raise `ConversionError` unless the value is absent or in `[low, high]`."""
    if value is not None and not low <= as_float32(value) <= high:
        raise ConversionError(
            f"Invalid {name} value, the valid range of {name} is {shown}", param=name
        )


def check_stop(stop: str | Sequence[str] | None, longest: int | None) -> tuple[str, ...]:
    """The stop sequences: at most 16, none empty, none over `longest` characters."""
    if stop is None:
        return ()
    sequences = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(sequences) > MAX_STOP_SEQUENCES:
        raise ConversionError(f"Stop string array too long: {len(sequences)}", param="stop")
    for index, sequence in enumerate(sequences):
        where = "stop" if isinstance(stop, str) else f"stop[{index}]"
        if not sequence:
            empty = "Expected a string with minimum length 1, but got an empty string instead."
            raise ConversionError(f"Invalid '{where}': empty string. {empty}", param=where)
        if longest is not None and len(sequence) > longest:
            size = f"{len(sequence)} characters; a stop sequence has at most {longest}."
            raise ConversionError(f"Invalid '{where}': {size}", param=where)
    return sequences


def check_max_tokens(builder: RequestBuilder) -> int | None:
    """The requested output limit, checked against (or lowered to) the bound of the mode."""
    options, sampling = builder.options, builder.sampling
    bound = (
        options.thinking_max_tokens_upper_bound
        if builder.thinking
        else options.non_thinking_max_tokens_upper_bound
    )
    requested = sampling.max_tokens
    if requested is None:
        return None
    if sampling.clamps_max_tokens:
        requested = min(requested, bound)
    if not 1 <= requested <= bound:
        raise ConversionError(
            f"Invalid max_tokens value, the valid range of max_tokens is [1, {bound}]",
            param="max_tokens",
        )
    return requested


def check_sampling(builder: RequestBuilder) -> tuple[int | None, tuple[str, ...]]:
    """Check all sampling fields; returns the output limit and the stop sequences."""
    sampling = builder.sampling
    stop = check_stop(sampling.stop, builder.policy.longest_stop)
    check_range("temperature", sampling.temperature, 0, 2, "[0, 2]")
    if sampling.top_p is not None and not 0 < as_float32(sampling.top_p) <= 1:
        raise ConversionError(
            "Invalid top_p value, the valid range of top_p is (0, 1.0]", param="top_p"
        )
    check_range("frequency_penalty", sampling.frequency_penalty, -2, 2, "[-2, 2]")
    check_range("presence_penalty", sampling.presence_penalty, -2, 2, "[-2, 2]")
    if sampling.seed is not None and sampling.seed >= 2**63:
        raise ConversionError(
            "Invalid seed value, the valid range of seed is [0, 2^63)", param="seed"
        )
    max_tokens = check_max_tokens(builder)
    if sampling.top_logprobs is not None:
        if not sampling.logprobs:
            raise ConversionError(
                "Invalid top_logprobs and logprobs value, logprobs must be set to true if "
                "top_logprobs is used.",
                param="top_logprobs",
            )
        if sampling.top_logprobs > 20:
            raise ConversionError(
                "Invalid top_logprobs value, the valid range of top_logprobs is [0, 20].",
                param="top_logprobs",
            )
    return max_tokens, stop


def resolve_temperature(
    builder: RequestBuilder, *, has_tools: bool
) -> tuple[float | None, float | None]:
    """Temperature and top_p to sample with."""
    asked_t, asked_p = builder.sampling.temperature, builder.sampling.top_p
    if isinstance(builder.version, TemplateModel):
        # What is left open is the model's own to say, in its generation_config.json.
        return (
            None if asked_t is None else as_float32(asked_t),
            None if asked_p is None else as_float32(asked_p),
        )
    honours = builder.policy.honours_sampling_in_thinking
    if honours and (asked_t is not None or asked_p is not None):
        # Explicit values win; what is left open gets the model's default.
        default_t, default_p = _reference_sampling(builder, None, None, has_tools=has_tools)
        return (
            default_t if asked_t is None else as_float32(asked_t),
            default_p if asked_p is None else as_float32(asked_p),
        )
    return _reference_sampling(builder, asked_t, asked_p, has_tools=has_tools)


def _reference_sampling(
    builder: RequestBuilder, asked_t: float | None, asked_p: float | None, *, has_tools: bool
) -> tuple[float, float]:
    top_p = 1.0 if asked_p is None else as_float32(asked_p)
    temperature = 1.0 if asked_t is None or builder.thinking else as_float32(asked_t)
    if builder.version is ModelVersion.DeepseekV41Flash:
        return temperature, max(top_p, as_float32(0.95)) if builder.thinking else 1.0
    if builder.thinking:
        return temperature, as_float32(0.95) if has_tools else 1.0
    return temperature, top_p


def fill_reasoning(builder: RequestBuilder, field_name: str) -> None:
    """Make the reasoning of past turns what the renderer wants: None exactly when not thinking.

    `field_name` is what the protocol calls it, for the error when it must be passed back.
    """
    rejects = builder.options.reasoning_content_behavior is ReasoningContentBehavior.Reject
    # Only the turns behind the last user's word are still being thought about.
    users = (i for i, m in enumerate(builder.messages) if m.role == "user")
    last_user = max(users, default=-1) if rejects else -1
    for index, message in enumerate(builder.messages):
        if not isinstance(message, AssistantMessage):
            continue
        given = message.reasoning_content
        reasoning = given if builder.thinking else None
        if builder.thinking and reasoning is None:
            if rejects and index > last_user and (builder.declares_tools or message.tool_calls):
                raise ConversionError(
                    f"The `{field_name}` in the thinking mode must be passed back to the API.",
                    param="messages",
                )
            reasoning = ""
        if reasoning != given:
            builder.messages[index] = with_thinking(message, reasoning)


def answer_constraint(answer: AnswerFormat, policy: Policy) -> OutputConstraint | None:
    """The constraint of an answer format; checks the schema."""
    if answer == "json_object":
        return OutputConstraint("json", "")
    if isinstance(answer, RegexFormat):
        return OutputConstraint("regex", answer.regex)
    if isinstance(answer, JsonSchemaFormat):
        schema = answer.schema
        if answer.strict:
            schema = _strict_answer(schema, policy)
        return OutputConstraint("json", compact_json(schema))
    return None


def _strict_answer(schema: Any, policy: Policy) -> dict[str, Any]:
    rules = StrictRules(
        shape_error="Invalid json schema: ",
        root_name="json schema",
        allows_empty_root=False,
        keeps_keywords=policy.keeps_strict_keywords,
        param="response_format",
    )
    return rules.normalise(schema)


def check_answer(answer: AnswerFormat) -> None:
    """Raise `ConversionError` if the answer's schema is not one (strict ones: see above)."""
    if isinstance(answer, JsonSchemaFormat) and not answer.strict:
        require_schema(answer.schema, "Invalid json schema", "response_format")


def mentions_json(messages: Sequence[Message]) -> bool:
    """Whether some message spells json, in any case."""
    return any("json" in message.content.lower() for message in messages)


def _chosen(builder: RequestBuilder) -> tuple[list[ToolDefinition], ToolChoice]:
    """Tools and mode of the tool choice; a forced call ends thinking unless it may follow it."""
    may_force = builder.policy.serves_forced_tools or not builder.thinking
    if builder.policy.refuses_forced_call_without_tools and not builder.tools:
        refuse_forced(builder.choice)
    tools, mode = resolve_choice(builder.tools, builder.choice, may_force=may_force)
    thinks_first = builder.options.thinks_before_forced_calls
    if mode == "required" and builder.thinking and not thinks_first:
        _stop_thinking(builder)
    return tools, mode


def _stop_thinking(builder: RequestBuilder) -> None:
    """No thinking in this answer, and none in the turns before it."""
    version = builder.version
    if isinstance(version, TemplateModel) and version.opens_thinking(thinking=False):
        return  # its prompt opens the thinking whatever is asked
    builder.thinking, builder.effort = False, None
    for index, message in enumerate(builder.messages):
        if isinstance(message, AssistantMessage) and message.reasoning_content is not None:
            builder.messages[index] = AssistantMessage(
                message.content, None, message.tool_calls, message.prefix
            )


def _initial_stage(builder: RequestBuilder) -> ThinkingInitialStage | None:
    if not builder.thinking:
        return None
    last = builder.messages[-1] if builder.messages else None
    if last is None or not last.prefix:
        return ThinkingInitialStage.ReasoningStart
    if last.content:
        return ThinkingInitialStage.ContentContinuation
    if last.reasoning_content:
        return ThinkingInitialStage.ReasoningContinuation
    return ThinkingInitialStage.ReasoningStart


def _check_prefix(builder: RequestBuilder) -> None:
    if not builder.messages or not builder.messages[-1].prefix:
        return
    calls = any(m.role == "tool" or m.tool_calls for m in builder.messages)
    if builder.declares_tools or calls:
        raise ConversionError("Function call should not be used with prefix", param="messages")


def finish(builder: RequestBuilder) -> ConversationRequest:
    """Check what is left to check (in the reference's order) and assemble the request."""
    tools, mode = _chosen(builder)
    excludes = builder.names_format and not builder.policy.allows_format_with_strict_tools
    if excludes and any(tool.strict for tool in tools):
        raise ConversionError(
            "response_format should not be used with tools", param="response_format"
        )
    _check_prefix(builder)
    check_answer(builder.answer)
    max_tokens, stop = check_sampling(builder)
    constraint = answer_constraint(builder.answer, builder.policy)
    if tools:
        constraint = tool_constraint(tools, mode)
    return ConversationRequest(
        _conversation(builder, tools, mode),
        builder.version,
        inference_options=_inference(builder, constraint, max_tokens, has_tools=bool(tools)),
        parsing_options=_parsing(builder, tools, mode, stop),
        stream=builder.stream,
        include_usage=builder.include_usage,
        user=builder.user,
        profile=builder.policy.name,
        server_tools=builder.server_tools if tools else {},
    )


def _conversation(
    builder: RequestBuilder, tools: list[ToolDefinition], mode: ToolChoice
) -> Conversation:
    answer = builder.answer
    return Conversation(
        builder.messages,
        thinking_mode=builder.thinking,
        tools=tools,
        # In thinking mode the prompt cannot open the calls: the constraint alone asks for them.
        tool_choice="auto" if mode == "required" and builder.thinking else mode,
        reasoning_effort=builder.effort,
        response_format="json_object" if answer == "json_object" else "text",
        response_schema=answer.schema if isinstance(answer, JsonSchemaFormat) else None,
        response_regex=answer.regex if isinstance(answer, RegexFormat) else None,
    )


def _inference(
    builder: RequestBuilder,
    constraint: OutputConstraint | None,
    max_tokens: int | None,
    *,
    has_tools: bool,
) -> InferenceOptions:
    sampling, honours = builder.sampling, builder.policy.honours_penalties
    temperature, top_p = resolve_temperature(builder, has_tools=has_tools)
    return InferenceOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        logprobs=sampling.logprobs,
        top_logprobs=sampling.top_logprobs,
        seed=sampling.seed,
        output_constraint=constraint,
        n=sampling.n,
        frequency_penalty=(sampling.frequency_penalty or 0.0) if honours else 0.0,
        presence_penalty=(sampling.presence_penalty or 0.0) if honours else 0.0,
    )


def _parsing(
    builder: RequestBuilder, tools: list[ToolDefinition], mode: ToolChoice, stop: tuple[str, ...]
) -> ParsingOptions:
    recovers = builder.policy.recovers_tool_calls
    version = builder.version
    own = isinstance(version, TemplateModel)
    opens_calls = bool(tools) and mode == "required" and not builder.thinking
    return ParsingOptions(
        parse_tool_calls=bool(tools),
        # A template's prompt opens no calls.
        starts_in_tool_calls=opens_calls and not own,
        dialect=version.dialect if own else "dsml",
        starts_in_thinking=version.opens_thinking(thinking=builder.thinking) if own else True,
        parse_json_output=builder.answer == "json_object",
        thinking_initial_stage=_initial_stage(builder),
        stop_sequences=stop,
        special_tokens=builder.options.special_tokens,
        recover_tool_calls=recovers,
        tool_parameters={tool.name: tool.parameter_names for tool in tools if tool.parameter_names},
        tool_call_logprobs=recovers and builder.options.tool_call_logprobs,
    )
