"""Rendering: a conversation to prompt text, with the places of its special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from deepinfer_recipe.base.json_text import parse_object, prompt_json
from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import Message, Role, SystemMessage
from deepinfer_recipe.conversation.special_tokens import SpecialToken, SpecialTokens
from deepinfer_recipe.conversation.tool_types import ToolCall, ToolDefinition
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat
from deepinfer_recipe.prompts.prompt_builder import PromptBuilder


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A rendered prompt and the image sources its placeholders refer to.

    special_ranges: ascending, disjoint half-open `(start, end)` code point offsets; each
        `prompt[start:end]` spells one special token that the renderer put there. All text
        between them is plain, whatever it spells, and is encoded without the tokenizer's
        added vocabulary by `DeepseekV4Encoding.encode` and `DeepseekV41Encoding.encode`.
    """

    prompt: str
    special_ranges: list[tuple[int, int]]
    image_sources: list[ImageSource]
    answer_ranges: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """What assistants wrote: from behind the token that opens each turn to its end token."""


def _rendered(out: PromptBuilder) -> RenderedPrompt:
    prompt, special_ranges, answer_ranges = out.joined()
    return RenderedPrompt(prompt, special_ranges, out.sources, answer_ranges)


def _tool_lines(tools: Iterable[ToolDefinition]) -> str:
    return "\n".join([tool.prompt_line for tool in tools])


def _system_block(
    out: PromptBuilder, conversation: Conversation, first_texts: Sequence[Message]
) -> None:
    """Effort, leading system text, tools, response format: what stands before the turns."""
    form = out.format
    start = out.place
    if form.system_in_place:
        out.special(SpecialToken.System)
    behind = out.place
    # A V4.1 prompt about nothing at all stays empty, without even the effort.
    about_something = conversation.history or _has_blocks(conversation)
    if conversation.thinking_mode and (about_something or not form.system_in_place):
        out.text(form.effort_texts[conversation.reasoning_effort or "high"])
    separator = ""
    for message in first_texts:
        if message.content:
            out.text(separator)
            out.message(message)
            separator = "\n\n"
    if conversation.has_tools:
        out.pieces(form.tools_block_head)
        out.text(_tool_lines(tool for tool in conversation.tools if not tool.defer_loading))
        out.pieces(form.tools_block_tail)
    if conversation.response_format == "json_object":
        out.text(form.json_object_block)
    elif conversation.response_format == "json_schema":
        out.text(form.json_schema_head + prompt_json(conversation.response_schema))
    if form.system_in_place and first_texts:
        _late_tools(out, first_texts[0])
    if form.system_in_place and not first_texts and out.is_empty_since(behind):
        out.drop_since(start)


def _late_tools(out: PromptBuilder, message: Message) -> None:
    if isinstance(message, SystemMessage) and message.tools:
        out.text(out.format.updated_tools_head + _tool_lines(message.tools))


def _has_blocks(conversation: Conversation) -> bool:
    """Whether something besides the effort stands in the system part by itself."""
    return conversation.has_tools or conversation.response_format.startswith("json")


def _invocation(out: PromptBuilder, call: ToolCall) -> None:
    form, parts, dsml = out.format, out.parts, out.dsml
    tag = form.parameter_tag
    parts += ("<", dsml, f'{form.invoke_tag} name="{call.name}">\n')
    arguments = parse_object(call.arguments)
    if arguments is None:
        arguments = {"arguments": call.arguments}
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        shown = value if is_string else prompt_json(value)
        head = f'{tag} name="{key}" string="{"true" if is_string else "false"}">'
        parts += ("<", dsml, head, shown, "</", dsml, f"{tag}>\n")
    if not arguments:
        out.text(form.empty_arguments_line)
    out.tag("</", f"{form.invoke_tag}>\n")


def _calls(out: PromptBuilder, calls: Sequence[ToolCall]) -> None:
    out.tag("\n\n<", f"{out.format.calls_tag}>\n")
    _invocations(out, calls)


def _invocations(out: PromptBuilder, calls: Sequence[ToolCall]) -> None:
    for call in calls:
        _invocation(out, call)
    out.tag("</", f"{out.format.calls_tag}>")


def _thinking_part(
    out: PromptBuilder, message: Message, conversation: Conversation, *, keeps: bool
) -> int:
    """Render the thinking part; returns the place where the model's own text begins."""
    reasoning = message.reasoning_content
    if out.format.fills_missing_reasoning:
        keeps = keeps and conversation.thinking_mode
        reasoning = reasoning or ""
    if keeps and reasoning is not None:
        start = out.place + 1
        out.parts += (out.thinking_start, reasoning, out.thinking_end)
        return start
    out.text(out.thinking_end)
    return out.place


def _assistant_turn(
    out: PromptBuilder, message: Message, conversation: Conversation, calls: Sequence[ToolCall]
) -> None:
    """Render an assistant turn that is complete."""
    out.text(out.assistant)
    start = _thinking_part(out, message, conversation, keeps=conversation.has_tools)
    out.text(message.segments[0])  # an assistant shows no pictures
    if calls:
        _calls(out, calls)
    out.text(out.eos)
    out.answer(start)


def _prefix_turn(
    out: PromptBuilder, conversation: Conversation, index: int, calls: Sequence[ToolCall]
) -> bool:
    """Render an assistant turn to be continued; True if it is left open for the model."""
    message = conversation.history[index]
    form = out.format
    is_last = index == len(conversation.history) - 1
    continued = is_last or form.system_in_place
    out.text(out.assistant)
    # A prefix turn keeps its own reasoning even where earlier turns lose theirs; but V4.1
    # treats a turn that nothing at all precedes as already past its thinking.
    own = index > 0 or _has_blocks(conversation) or not form.system_in_place
    bare = own and is_last and not message.content and not calls
    if bare and conversation.thinking_mode:
        if message.reasoning_content is not None or form.fills_missing_reasoning:
            out.text(out.thinking_start)
        start = out.place
        out.text(message.reasoning_content or "")
        out.answer(start)
        return True
    start = _thinking_part(out, message, conversation, keeps=conversation.has_tools or own)
    out.message(message)
    if calls:
        _calls(out, calls)
    if not continued:
        out.text(out.eos)
    out.answer(start)
    return is_last


def _shown_calls(message: Message, form: PromptFormat) -> Sequence[ToolCall]:
    calls = message.tool_calls or []
    if calls and form.sorts_calls_by_id:
        calls.sort(key=lambda call: call.id)
    return calls


def _sorted_results(run: Sequence[Message], calls: Sequence[ToolCall]) -> Sequence[Message]:
    """Put the tool results of a run into the order of the calls they answer."""
    if len(run) < 2 or len(calls) < 2:
        return run
    order = {call.id: position for position, call in enumerate(calls)}

    def rank(message: Message) -> int:
        return order.get(message.tool_call_id or "", -1)

    places = [i for i, m in enumerate(run) if m.role == "tool" and rank(m) >= 0]
    results = sorted((run[i] for i in places), key=rank)
    arranged = list(run)
    for place, message in zip(places, results, strict=True):
        arranged[place] = message
    return arranged


def _user_turn(out: PromptBuilder, run: Sequence[Message], calls: Sequence[ToolCall]) -> None:
    """One user turn: every tool result a block, and the user text, joined by blank lines."""
    out.text(out.user)
    arranged = _sorted_results(run, calls)
    if out.format.drops_empty_parts:
        # The texts behind the results are one block, empty ones dropped inside it.
        texts = [m for m in arranged if m.role != "tool"]
        filled = [m for m in texts if m.content]
        arranged = [m for m in arranged if m.role == "tool"] + (filled or texts[:1])
    separator = ""
    for message in arranged:
        if message.role == "tool":
            out.text(f"{separator}<tool_result>")
            out.message(message)
            out.text("</tool_result>")
        else:
            out.text(separator)
            out.message(message)
        separator = "\n\n"


def _run_end(form: PromptFormat, roles: Sequence[Role], start: int) -> int:
    """End of the run of user and tool messages that begins at `start`."""
    end = start
    while end < len(roles):
        role = roles[end]
        if role == "system" and not form.system_in_place:
            end += 1
            continue
        if role not in ("user", "tool"):
            break
        # Without in-place system text a result behind user text opens a turn of its own.
        if not form.system_in_place and role == "tool" and end > start:
            others = (r for r in reversed(roles[start:end]) if r != "system")
            if next(others, "tool") == "user":
                break
        end += 1
    return end


def render(conversation: Conversation, form: PromptFormat, tokens: SpecialTokens) -> RenderedPrompt:
    """Render a conversation into the prompt that asks for its next assistant turn."""
    messages = conversation.history
    out = PromptBuilder(form, tokens)
    out.special(SpecialToken.Bos)
    if form.system_in_place:
        leading = messages[:1] if messages and messages[0].role == "system" else []
        index = len(leading)
    else:
        leading = [m for m in messages if m.role == "system"]
        index = 0
    _system_block(out, conversation, leading)
    left_open = _turns(out, conversation, index)
    if not left_open:
        _open_answer(out, conversation)
    return _rendered(out)


def render_completion(
    message: Message, conversation: Conversation, form: PromptFormat, tokens: SpecialTokens
) -> RenderedPrompt:
    """Render what the model writes when its answer is `message`: the text behind the prompt.

    It begins right after the thinking (or end of thinking) token that the prompt ends with,
    and ends with the end-of-sentence token.
    """
    out = PromptBuilder(form, tokens)
    forced = conversation.tool_choice == "required" and bool(conversation.tools)
    if conversation.thinking_mode and not forced:
        out.text(message.reasoning_content or "")
        out.text(out.thinking_end)
    calls = message.tool_calls
    if forced:
        _invocations(out, calls or ())
    else:
        out.message(message)
        if calls:
            _calls(out, calls)
    out.text(out.eos)
    return _rendered(out)


def _turns(out: PromptBuilder, conversation: Conversation, index: int) -> bool:
    messages = conversation.history
    form = out.format
    calls: Sequence[ToolCall] = ()
    left_open = False
    roles: list[Role] = [message.role for message in messages]
    # Most turns are one message without tools; those take the short way.
    joins = ("user", "tool") if form.system_in_place else ("user", "tool", "system")
    loses_thinking = not conversation.has_tools
    while index < len(messages):
        message, role = messages[index], roles[index]
        left_open = False
        if role == "user" and (index + 1 == len(roles) or roles[index + 1] not in joins):
            out.parts.append(out.user)
            out.message(message)
        elif role in ("user", "tool"):
            end = _run_end(form, roles, index)
            run: Sequence[Message] = messages[index:end]
            if not form.system_in_place:
                run = [m for m in run if m.role != "system"]
            _user_turn(out, run, calls)
            index = end
            continue
        elif role == "assistant":
            calls = _shown_calls(message, form)
            if message.prefix:
                left_open = _prefix_turn(out, conversation, index, calls)
            elif loses_thinking and not calls:
                out.plain_answer(message.segments[0])
            else:
                _assistant_turn(out, message, conversation, calls)
        elif role == "latest_reminder":
            # The V4.1 models were served with only the first reminder of a run.
            is_first = index == 0 or roles[index - 1] != "latest_reminder"
            if is_first or not form.system_in_place:
                out.special(SpecialToken.LatestReminder)
                out.message(message)
        elif form.system_in_place:
            out.special(SpecialToken.System)
            out.message(message)
            _late_tools(out, message)
        index += 1
    return left_open


def _open_answer(out: PromptBuilder, conversation: Conversation) -> None:
    out.text(out.assistant)
    thinking = conversation.thinking_mode
    out.text(out.thinking_start if thinking else out.thinking_end)
    if conversation.tool_choice == "required" and conversation.tools:
        out.tag("\n\n<", f"{out.format.calls_tag}>\n")
