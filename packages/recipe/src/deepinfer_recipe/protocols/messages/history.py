"""Turns of a Messages request into the messages of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.base.json_text import prompt_json
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
from deepinfer_recipe.protocols.common.options import WebSearchBehavior
from deepinfer_recipe.protocols.common.web_search import result_text
from deepinfer_recipe.protocols.messages import body as wire
from deepinfer_recipe.protocols.messages.search import search_turns

_MISSING_RESULTS = (
    "`tool_use` ids were found without `tool_result` blocks immediately after: {ids}. Each "
    "`tool_use` block must have a corresponding `tool_result` block in the next message."
)


class History:
    """Turns of a request into messages; knows the tools that references point to."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder = builder
        self._tools = {tool.name: tool for tool in builder.tools}
        self._messages: list[Message] = []
        in_place = builder.version.prompt_format.system_in_place
        self._announces = in_place and builder.choice != "none"
        """Whether tools can be announced by a system message."""
        self._pending: list[str] = []
        """Ids of calls that the next user turn must answer."""

    def convert(self, body: wire.MessagesBody) -> list[Message]:
        if body.system is not None:
            text = body.system
            if not isinstance(text, str):
                text = SEPARATOR.join(block.text for block in text)
            self._messages.append(SystemMessage(text))
        last = len(body.messages) - 1
        for index, turn in enumerate(body.messages):
            blocks = turn.content
            if isinstance(blocks, str):
                blocks = [wire.TextBlock(type="text", text=blocks)]
            may_be_empty = turn.role == "system" or (
                turn.role == "assistant" and self._builder.policy.takes_text_behind_calls
            )
            if not blocks and not may_be_empty:
                raise ConversionError(
                    f"messages.{index}: all messages must have non-empty content",
                    param=f"messages[{index}].content",
                )
            if self._pending and turn.role != "user":
                raise self._missing(f"messages.{index}: ", index, self._pending)
            if turn.role == "assistant":
                self._assistant(blocks, index, is_last=index == last)
            elif turn.role == "system":
                self._system(blocks, index)
            else:
                self._user(blocks, index)
        if self._pending:
            raise self._missing(f"messages.{last}:", last, self._pending)
        return self._messages

    def _missing(self, place: str, index: int, ids: Iterable[str]) -> ConversionError:
        return ConversionError(
            place + _MISSING_RESULTS.format(ids=", ".join(sorted(ids))), param=f"messages[{index}]"
        )

    def _joined(self) -> JoinedContent:
        return JoinedContent(
            self._builder.version.prompt_format.has_pictures,
            self._builder.options.special_tokens.token(SpecialToken.Image),
        )

    def _document(self, block: wire.DocumentBlock, place: str) -> str:
        source = block.source
        if not self._builder.policy.reads_documents:
            return f"[Unsupported document type: {source.media_type or 'unknown'}]"
        title = block.title if isinstance(block.title, str) else None
        reader, data = self._builder.documents, source.data
        if source.type == "text" and isinstance(data, str):
            return reader.from_text(data, title, place)
        if source.type == "base64" and isinstance(data, str):
            return reader.from_encoded(data, title, place, source.media_type or "")
        raise ConversionError(
            f"{place}.source: expected type `text` or `base64` with `data` as a string, "
            f"got type {source.type!r:.40}",
            param=f"{place}.source",
        )

    def _plain(self, block: Any, place: str) -> str | ImageSource:
        """Text, picture or document as a content part."""
        if isinstance(block, wire.TextBlock):
            return block.text
        if isinstance(block, wire.DocumentBlock):
            return self._document(block, place)
        if isinstance(block, wire.SearchResultBlock):
            text = SEPARATOR.join(part.text for part in block.content)
            return f"[{block.title}]({block.source})\n{text}"
        if not self._builder.version.prompt_format.has_pictures:
            return UNSUPPORTED_IMAGE
        source = block.source
        if isinstance(source, wire.Base64Source):
            return pictures.from_base64(source.media_type, source.data, place)
        if isinstance(source, wire.UrlSource):
            return pictures.from_url(source.url, place)
        raise ConversionError(
            f"{place}: file_id is not supported. Pass the image as a base64 data url instead.",
            param=place,
        )

    def _refuse_misplaced(self, block: Any, role: str, index: int) -> None:
        param = f"messages[{index}].content"
        place = f"messages.{index}"
        if role != "assistant":
            if isinstance(block, wire.ThinkingBlock | wire.RedactedThinkingBlock):
                raise ConversionError(
                    f"{place}.content: thinking blocks may only be in `assistant` messages",
                    param=param,
                )
            if isinstance(
                block, wire.ToolUseBlock | wire.ServerToolUseBlock | wire.WebSearchResultBlock
            ):
                raise ConversionError(
                    f"{place}: `tool_use` blocks can only be in `assistant` messages", param=param
                )
        if role != "user" and isinstance(block, wire.ToolResultBlock):
            raise ConversionError(
                f"{place}: `tool_result` blocks can only be in `user` messages", param=param
            )
        if role != "system" and isinstance(block, wire.ToolAdditionBlock):
            raise ConversionError(
                f"{place}: `tool_addition` blocks can only be in `system` messages", param=param
            )

    def _system(self, blocks: Sequence[wire.Block], index: int) -> None:
        content = self._joined()
        added: list[ToolDefinition] = []
        for position, block in enumerate(blocks):
            self._refuse_misplaced(block, "system", index)
            if isinstance(block, wire.ToolAdditionBlock):
                tool = self._tools.get(block.tool.name)
                if tool is None:
                    raise ConversionError(
                        f"messages.{index}.content.{position}: `tool_addition` references "
                        f"unknown tool '{block.tool.name}'",
                        param=f"messages[{index}].content[{position}]",
                    )
                added.append(tool)
            else:
                content.add(self._plain(block, f"messages.{index}"))
        if self._builder.version.prompt_format.system_in_place:
            message = content.system()
            if added and self._announces:
                message = message.announcing(added)
            elif added and not content.text:
                return
            self._messages.append(message)
        elif content.text:
            # Where all system text moves to the front, a late instruction travels as user text.
            reminder = f"<system-reminder>\n{content.text}\n</system-reminder>"
            self._messages.append(UserMessage(reminder))

    def _assistant(self, blocks: Sequence[wire.Block], index: int, *, is_last: bool) -> None:
        if self._builder.options.messages_web_search is not WebSearchBehavior.Run:
            self._assistant_turn(blocks, index, is_last=is_last)
            return
        read = self._builder.options.search_result_text or result_text
        turns = list(search_turns(blocks, f"messages[{index}].content", read))
        for number, turn in enumerate(turns):
            self._assistant_turn(turn.blocks, index, is_last=is_last and number == len(turns) - 1)
            self._messages += [ToolMessage(text, use_id) for use_id, text in turn.results.items()]
            self._pending = [call_id for call_id in self._pending if call_id not in turn.results]

    def _assistant_turn(self, blocks: Sequence[wire.Block], index: int, *, is_last: bool) -> None:
        builder = self._builder
        place = f"messages.{index}"
        reasoning: list[str] = []
        texts: list[str] = []
        calls: list[ToolCall] = []
        ids: set[str] = set()
        for position, block in enumerate(blocks):
            self._refuse_misplaced(block, "assistant", index)
            if isinstance(block, wire.ThinkingBlock):
                reasoning.append(block.thinking)
            elif isinstance(block, wire.RedactedThinkingBlock):
                continue
            elif isinstance(block, wire.ToolUseBlock):
                if block.id in ids:
                    raise ConversionError(
                        f"{place}.content.{position}: `tool_use` ids must be unique",
                        param=f"messages[{index}].content[{position}].id",
                    )
                ids.add(block.id)
                calls.append(ToolCall(block.id, block.name, prompt_json(block.input)))
            elif isinstance(block, wire.ServerToolUseBlock | wire.WebSearchResultBlock):
                if builder.options.messages_web_search is WebSearchBehavior.Reject:
                    raise ConversionError(
                        "Unsupported content block: server tools are not supported",
                        param=f"messages[{index}].content[{position}]",
                    )
            else:
                if calls and not builder.policy.takes_text_behind_calls:
                    raise self._missing(f"{place}.{position}: ", index, ids)
                part = self._plain(block, f"{place}.content[{position}]")
                if not isinstance(part, str):
                    raise ConversionError(
                        "Image in assistant message is unsupported",
                        param=f"messages[{index}].content[{position}]",
                    )
                if part or texts:  # an empty beginning is none
                    texts.append(part)
        thoughts = SEPARATOR.join(reasoning) if reasoning else None
        # A final assistant message is a beginning that the model continues; the reference
        # opens a new turn behind it.
        calls_seen = calls or any(message.tool_calls for message in self._messages)
        may_continue = is_last and not calls_seen and not builder.tools
        is_prefill = builder.policy.continues_last_message and may_continue
        self._messages.append(
            AssistantMessage(SEPARATOR.join(texts), thoughts, calls or None, is_prefill)
        )
        self._pending = [call.id for call in calls]

    def _user(self, blocks: Sequence[wire.Block], index: int) -> None:
        referenced: list[ToolDefinition] = []
        answered: set[str] = set()
        is_leading = True
        wanted = self._pending
        known = set(wanted)
        for position, block in enumerate(blocks):
            self._refuse_misplaced(block, "user", index)
            place = f"messages.{index}.content"
            if isinstance(block, wire.ToolResultBlock):
                if block.tool_use_id in answered:
                    raise ConversionError(
                        f"{place}.{position}: each tool_use must have a single result. Found "
                        f"multiple `tool_result` blocks with id: {block.tool_use_id}",
                        param=f"messages[{index}].content[{position}]",
                    )
                if not is_leading or block.tool_use_id not in known:
                    raise ConversionError(
                        f"unexpected `{place}.{position}: tool_use_id` found in `tool_result` "
                        f"blocks: {block.tool_use_id}. Each `tool_result` block must have a "
                        "corresponding `tool_use` block in the previous message.",
                        param=f"messages[{index}].content[{position}].tool_use_id",
                    )
                answered.add(block.tool_use_id)
                self._result(block, f"{place}.{position}", referenced)
                continue
            if is_leading and len(answered) < len(known):
                raise self._missing(f"messages.{index}: ", index, known - answered)
            is_leading = False
            if isinstance(block, wire.TextBlock):
                self._messages.append(UserMessage(block.text))
            else:
                part = self._plain(block, f"{place}[{position}]")
                self._messages.append(self._joined().extend([part]).user())
        unanswered = [call_id for call_id in wanted if call_id not in answered]
        if unanswered:
            raise self._missing(f"messages.{index - 1}:", index, unanswered)
        self._pending = []
        if referenced and self._announces:
            self._messages.append(SystemMessage("", tools=referenced))

    def _result(
        self, block: wire.ToolResultBlock, place: str, referenced: list[ToolDefinition]
    ) -> None:
        content = self._joined()
        if isinstance(block.content, str):
            content.add(block.content)
        for part in () if isinstance(block.content, str) else block.content or ():
            if isinstance(part, wire.ToolReference):
                tool = self._tools.get(part.tool_name)
                if tool is None:
                    raise ConversionError(
                        f"{place}: tool reference '{part.tool_name}' not found in available tools",
                        param=place,
                    )
                referenced.append(tool)
                content.add(part.tool_name)
            else:
                content.add(self._plain(part, f"{place}.tool_result"))
        self._messages.append(content.tool(block.tool_use_id))
