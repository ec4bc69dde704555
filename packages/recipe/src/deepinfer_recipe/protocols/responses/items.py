"""Items of a Responses request into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_recipe.base.errors import ConversionError, SealError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.conversation.tool_types import ToolCall, ToolDefinition
from deepinfer_recipe.prompts.prompt_builder import UNSUPPORTED_IMAGE
from deepinfer_recipe.protocols.common import pictures
from deepinfer_recipe.protocols.common.builder import RequestBuilder
from deepinfer_recipe.protocols.common.content import SEPARATOR, JoinedContent
from deepinfer_recipe.protocols.responses import body as wire
from deepinfer_recipe.protocols.responses.tools import (
    TOOL_SEARCH,
    definitions,
    echoed,
    full_name,
)
from deepinfer_recipe.stores.sealing import PREFIX as SEAL_PREFIX

UNSUPPORTED_DOCUMENT = "[Unsupported Document]"


@dataclass(frozen=True, slots=True)
class ParsedResponses:
    """A parsed body: its envelope, and the items and tools this codec knows.

    continues: whether the items begin with those of earlier answers; stores: whether the answer
    will be kept.
    """

    body: wire.ResponsesBody
    items: list[tuple[int, wire.Item]] | None
    tools: list[tuple[int, wire.Tool]]
    continues: bool = False
    stores: bool = False

    @property
    def model(self) -> str:
        """The requested model name."""
        return self.body.model


@dataclass(slots=True)
class _Turn:
    """An assistant turn under construction."""

    reasoning: list[str] | None = None
    texts: list[str] = field(default_factory=list[str])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


class History:
    """Items of a request into messages."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder = builder
        self._messages: list[Message] = []
        self._turn: _Turn | None = None
        self._waiting: dict[str, None] = {}
        """Ids of the last turn's calls, in order, until another item follows their outputs."""
        self._outputs: dict[str, ToolMessage] = {}
        self._call_ids: set[str] = set()
        """Ids of all calls of the request."""
        self._found: list[ToolDefinition] = []
        self._announced: list[ToolDefinition] = []

    def convert(self, parsed: ParsedResponses) -> tuple[list[Message], list[ToolDefinition]]:
        """The messages, and the tools that searches found."""
        body = parsed.body
        if body.instructions:
            self._messages.append(SystemMessage(body.instructions))
        if body.input is None and not parsed.continues:
            if not body.instructions:
                raise ConversionError(
                    "Either input or instructions must be provided", param="input"
                )
        elif isinstance(body.input, str) and not parsed.continues:
            self._messages.append(UserMessage(body.input))
        elif not parsed.items and not body.input:
            raise ConversionError("Input items array must not be empty", param="input")
        for index, item in parsed.items or ():
            self._item(item, index)
        self._close_turn()
        self._close_outputs()
        return self._messages, self._found

    def _item(self, item: wire.Item, index: int) -> None:
        place = f"input[{index}]"
        if isinstance(item, wire.AdditionalToolsItem):
            return  # its tools stand with those of the request
        is_search = isinstance(item, wire.ToolSearchCallItem | wire.ToolSearchOutputItem)
        if is_search and not self._builder.version.prompt_format.system_in_place:
            return  # tools cannot be announced late there: searching for them leaves no trace
        if isinstance(item, wire.CallOutputItem | wire.CustomCallOutputItem):
            content = self._joined(item.output or "", place)
            if item.call_id is None:
                # It answers nothing in particular, but is still a result.
                self._close_turn()
                self._close_outputs()
                self._messages.append(content.tool(None))
            else:
                self._output(item.call_id, content, place)
        elif isinstance(item, wire.ToolSearchOutputItem):
            self._search_output(item, place)
        elif isinstance(item, wire.MessageItem):
            self._message(item, place)
        elif isinstance(item, wire.ReasoningItem):
            self._reasoning(self._thoughts(item, f"{place}.encrypted_content"))
        else:
            self._call(item, place)

    def _thoughts(self, item: wire.ReasoningItem, place: str) -> list[str]:
        """What the item says in clear, or what it holds sealed: that is as this server wrote it."""
        shown = [part.text for part in item.content or ()]
        sealed, sealer = item.encrypted_content, self._builder.options.reasoning_sealer
        if not self._builder.policy.uses_response_store or sealer is None or sealed is None:
            return shown
        if not isinstance(sealed, str):
            raise ConversionError(f"{place}: expected a string", param=place)
        if shown and not sealed.startswith(SEAL_PREFIX):
            return shown  # another server's, or a placeholder, beside the text itself
        try:
            return [sealer.open(sealed)]
        except SealError as error:
            raise ConversionError(
                f"{place}: cannot be opened, {error}", param=place, code="invalid_encrypted_content"
            ) from None

    def _reasoning(self, texts: list[str]) -> None:
        self._close_outputs()
        turn = self._turn
        is_empty = not any(texts) and len(texts) < 2
        joins = self._builder.policy.takes_text_behind_calls
        goes_on = turn is not None and bool(turn.calls) and joins
        if turn is not None and not goes_on and (turn.calls or (turn.texts and not is_empty)):
            self._close_turn()
            self._close_outputs()
            turn = None
        if is_empty:
            return
        if turn is None:
            turn = self._turn = _Turn()
        turn.reasoning = (turn.reasoning or []) + texts

    def _message(self, item: wire.MessageItem, place: str) -> None:
        if item.role != "assistant":
            self._close_turn()
            self._close_outputs()
            content = self._joined(item.content, place)
            # V4 knows no system text after the first; a developer's word is a user's there.
            in_place = self._builder.version.prompt_format.system_in_place
            is_system = item.role == "system" or (item.role == "developer" and in_place)
            self._messages.append(content.system() if is_system else content.user())
            return
        self._close_outputs()
        content = self._joined(item.content, place)
        if content.sources:
            raise ConversionError(
                f"{place}: Image in assistant message is unsupported", param=place
            )
        joins = self._builder.policy.takes_text_behind_calls
        if self._turn is None or (self._turn.calls and not joins):
            self._close_turn()
            self._close_outputs()
            self._turn = _Turn()
        if content.text:
            self._turn.texts.append(content.text)

    def _call(
        self,
        item: wire.FunctionCallItem | wire.CustomCallItem | wire.ToolSearchCallItem,
        place: str,
    ) -> None:
        self._require_id(item.call_id, place)
        self._close_outputs()
        if isinstance(item, wire.FunctionCallItem):
            name = item.name
            if item.namespace:
                name = full_name(item.namespace, name, self._builder.version.prompt_format)
            call = ToolCall(item.call_id, name, item.arguments)
        elif isinstance(item, wire.CustomCallItem):
            name = item.name
            if item.namespace and self._builder.policy.reads_newer_blocks:
                name = full_name(item.namespace, name, self._builder.version.prompt_format)
            call = ToolCall(item.call_id, name, compact_json({"input": item.input}))
        else:
            call = ToolCall(item.call_id, TOOL_SEARCH, compact_json(item.arguments))
        if self._turn is None:
            self._turn = _Turn()
        if call.id in self._call_ids:
            raise ConversionError(f"Duplicate 'call_id': {call.id}.", param=f"{place}.call_id")
        self._call_ids.add(call.id)
        self._turn.calls.append(call)

    def _require_id(self, call_id: str, place: str) -> None:
        if not call_id:
            raise ConversionError(
                f"Invalid '{place}.call_id': empty string. Expected a string with minimum length "
                "1, but got an empty string instead.",
                param=f"{place}.call_id",
            )

    def _close_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        reasoning = None if turn.reasoning is None else "\n".join(turn.reasoning)
        if self._builder.policy.sorts_calls_by_id:
            # Only the order in which they were made continues the prompt that the model saw,
            # but the reference goes by the ids.
            turn.calls.sort(key=lambda call: call.id)
        self._messages.append(
            AssistantMessage(SEPARATOR.join(turn.texts), reasoning, turn.calls or None)
        )
        self._waiting = dict.fromkeys(call.id for call in turn.calls)

    def _close_outputs(self) -> None:
        """Something else follows: all calls must be answered."""
        for call_id in self._waiting:
            if call_id not in self._outputs:
                raise ConversionError(
                    f"No tool output found for tool call {call_id}.", param="input"
                )
        self._messages += [self._outputs[call_id] for call_id in self._waiting]
        self._waiting = {}
        self._outputs = {}
        if self._announced:
            self._messages.append(SystemMessage("", tools=self._announced))
            self._announced = []

    def _output(self, call_id: str, content: JoinedContent, place: str) -> None:
        self._require_id(call_id, place)
        self._close_turn()
        if call_id in self._outputs:
            raise ConversionError(
                f"Duplicate tool output for call_id: {call_id}.", param=f"{place}.call_id"
            )
        if call_id not in self._waiting:
            raise ConversionError(
                f"No tool call found for tool output with call_id {call_id}.",
                param=f"{place}.call_id",
            )
        self._outputs[call_id] = content.tool(call_id)

    def _search_output(self, item: wire.ToolSearchOutputItem, place: str) -> None:
        tools = item.tools
        if item.unsupported is not None:
            here = f"{place}.tools[{item.unsupported}]"
            raise ConversionError(f"{here}: tools of this type cannot be found", param=here)
        listed = compact_json([echoed(tool) for _, tool in tools])
        self._output(item.call_id, self._empty().extend([listed]), place)
        form = self._builder.version.prompt_format
        is_off = self._builder.choice == "none"
        found = definitions(
            tools,
            form,
            self._builder.options,
            self._builder.policy,
            checks_schemas=not is_off,
            within=f"{place}.tools",
        )
        if is_off:
            return
        deferred = [
            ToolDefinition(t.name, t.description, t.parameters, t.strict, True) for t in found
        ]
        self._found += deferred
        self._announced += deferred

    def _empty(self) -> JoinedContent:
        return JoinedContent(
            self._builder.version.prompt_format.has_pictures,
            self._builder.options.special_tokens.token(SpecialToken.Image),
        )

    def _joined(self, content: str | Sequence[Any], place: str) -> JoinedContent:
        return self._empty().extend(_parts(content, place, self._builder))


def _parts(
    content: str | Sequence[Any], place: str, builder: RequestBuilder
) -> Iterator[str | ImageSource]:
    if isinstance(content, str):
        yield content
        return
    for index, part in enumerate(content):
        if isinstance(part, wire.TextPart | wire.InputTextPart):
            yield part.text
        elif isinstance(part, wire.ImagePart):
            if not builder.version.prompt_format.has_pictures:
                yield UNSUPPORTED_IMAGE
                continue
            yield _picture(part, place, f"{place}.content[{index}]")
        elif not builder.policy.reads_documents:
            yield UNSUPPORTED_DOCUMENT
        else:
            yield _document(part, f"{place}.content[{index}]", builder)


def _document(part: wire.FilePart, place: str, builder: RequestBuilder) -> str:
    if not isinstance(part.file_data, str):
        raise ConversionError(
            f"{place}: expected `file_data`, a data URL or base64; `file_id` and `file_url` are "
            "not supported",
            param=place,
        )
    title = part.filename if isinstance(part.filename, str) else None
    return builder.documents.from_encoded(part.file_data, title, place)


def _picture(part: wire.ImagePart, place: str, here: str) -> ImageSource:
    if part.image_url is not None and part.file_id is not None:
        raise ConversionError(
            f"{here}: input_image cannot have both image_url and file_id", param=here
        )
    if part.file_id is not None:
        raise ConversionError(
            f"{here}: file_id is not supported. Pass the image as a base64 data url instead.",
            param=here,
        )
    if part.image_url is None:
        raise ConversionError(f"{here}: input_image must have image_url or file_id", param=here)
    return pictures.from_reference(part.image_url, part.detail, place)
