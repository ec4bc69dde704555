"""The messages of a conversation.

All types are immutable values. A message's text may hold picture placeholders: it is kept as
the pieces of text between them, so that a placeholder is never confused with the same
characters typed by a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.base.values import Value, require_str
from deepinfer_recipe.conversation.image_source import ImageSource
from deepinfer_recipe.conversation.special_tokens import SpecialToken
from deepinfer_recipe.conversation.tool_types import ToolCall, ToolDefinition

ToolChoice: TypeAlias = Literal["auto", "none", "required"]
ReasoningEffort: TypeAlias = Literal["low", "high", "xhigh", "max"]
ResponseFormat: TypeAlias = Literal["text", "json_object", "json_schema", "regex"]
Role: TypeAlias = Literal["system", "user", "assistant", "tool", "latest_reminder"]

IMAGE_TOKEN = SpecialToken.Image.value


def split_placeholders(content: str, count: int, image_token: str | None) -> tuple[str, ...]:
    """Cut `content` at the first `count` spellings of the image token."""
    if image_token == "":
        raise ValueError("image_token must not be empty")
    if not count:
        return (content,)
    return tuple(content.split(image_token or IMAGE_TOKEN, count))


class Message(Value):
    """Base class of the messages in a conversation.

    Every message has a role and content. On a message of another role, the role-specific
    properties have fixed values: `reasoning_content`, `tool_calls`, and `tool_call_id` are
    None, `prefix` is False, and `image_sources` is an empty list.
    """

    __slots__ = ("_image_sources", "_image_token", "_segments")
    _role: Role

    def __init__(
        self,
        segments: tuple[str, ...],
        image_sources: Sequence[ImageSource] | None = None,
        image_token: str | None = None,
    ) -> None:
        self._segments = segments
        self._image_sources = tuple(image_sources or ())
        self._image_token = image_token or IMAGE_TOKEN

    @property
    def role(self) -> Role:
        """Who speaks."""
        return self._role

    @property
    def content(self) -> str:
        """The text, picture placeholders spelled as the image token."""
        return self._image_token.join(self._segments)

    @property
    def segments(self) -> tuple[str, ...]:
        """The pieces of text between the picture placeholders; one more than placeholders."""
        return self._segments

    @property
    def reasoning_content(self) -> str | None:
        """What an assistant message's author thought before it."""
        return None

    @property
    def tool_calls(self) -> list[ToolCall] | None:
        """The calls an assistant message makes."""
        return None

    @property
    def tool_call_id(self) -> str | None:
        """The call that a tool message answers."""
        return None

    @property
    def image_sources(self) -> list[ImageSource]:
        """Pictures, in the order of their placeholders."""
        return list(self._image_sources)

    @property
    def prefix(self) -> bool:
        """Whether an assistant message is continued instead of starting a new turn."""
        return False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.content!r})"


class _PictureMessage(Message):
    """A message whose first image-token spellings are placeholders of its sources."""

    __slots__ = ()

    def _set_content(
        self, content: str, image_sources: Sequence[ImageSource] | None, image_token: str | None
    ) -> None:
        if type(content) is str and not image_sources and image_token is None:
            self._segments = (content,)
            self._image_sources = ()
            self._image_token = IMAGE_TOKEN
            return
        require_str("content", content)
        sources = list(image_sources or ())
        segments = split_placeholders(content, len(sources), image_token)
        Message.__init__(self, segments, sources, image_token)

    @classmethod
    def from_segments(
        cls, segments: tuple[str, ...], image_sources: Sequence[ImageSource], image_token: str
    ) -> Any:
        """Build from the text around each placeholder, whatever that text spells."""
        message = cls("")  # type: ignore[call-arg]
        Message.__init__(message, segments, image_sources, image_token)
        return message


class SystemMessage(_PictureMessage):
    """A system message. See `UserMessage` for image placeholder rules.

    `tools` announces tools at this place of the conversation (V4.1).
    """

    __slots__ = ("_tools",)
    _role = "system"

    def __init__(
        self,
        content: str,
        image_sources: Sequence[ImageSource] | None = None,
        tools: Sequence[ToolDefinition] | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        self._set_content(content, image_sources, image_token)
        self._tools = None if tools is None else tuple(tools)

    def announcing(self, tools: Sequence[ToolDefinition]) -> SystemMessage:
        """Return the same text announcing `tools`."""
        message = SystemMessage("", tools=tools)
        Message.__init__(message, self._segments, self._image_sources, self._image_token)
        return message

    @property
    def tools(self) -> list[ToolDefinition] | None:
        """Tools announced here, None for a plain system message."""
        return None if self._tools is None else list(self._tools)


class UserMessage(_PictureMessage):
    """A user message.

    The first occurrences of `image_token` in `content`, one per image source, become the
    placeholders of the image sources; later occurrences are plain text. `image_token`
    defaults to the default image token spelling. When `content` holds fewer occurrences than
    there are image sources, the message keeps every image source, so a rendered prompt holds
    fewer placeholders than image sources. An empty `image_token` raises `ValueError`.
    """

    __slots__ = ()
    _role = "user"

    def __init__(
        self,
        content: str,
        image_sources: Sequence[ImageSource] | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        self._set_content(content, image_sources, image_token)


class AssistantMessage(Message):
    """An assistant message."""

    __slots__ = ("_prefix", "_reasoning_content", "_tool_calls")
    _role = "assistant"

    def __init__(
        self,
        content: str,
        reasoning_content: str | None = None,
        tool_calls: Sequence[ToolCall] | None = None,
        prefix: bool = False,
    ) -> None:
        if type(content) is not str:
            require_str("content", content)
        self._segments = (content,)
        self._image_sources = ()
        self._image_token = IMAGE_TOKEN
        self._reasoning_content = reasoning_content
        self._tool_calls = None if tool_calls is None else tuple(tool_calls)
        self._prefix = prefix

    @property
    def reasoning_content(self) -> str | None:
        return self._reasoning_content

    @property
    def tool_calls(self) -> list[ToolCall] | None:
        return None if self._tool_calls is None else list(self._tool_calls)

    @property
    def prefix(self) -> bool:
        return self._prefix


def with_thinking(message: AssistantMessage, reasoning_content: str | None) -> AssistantMessage:
    """The same message with other thoughts before it."""
    made = AssistantMessage(message.segments[0], reasoning_content, prefix=message.prefix)
    made._tool_calls = message._tool_calls  # pyright: ignore[reportPrivateUsage]
    return made


class ToolMessage(_PictureMessage):
    """A tool result message. See `UserMessage` for image placeholder rules."""

    __slots__ = ("_tool_call_id",)
    _role = "tool"

    def __init__(
        self,
        content: str,
        tool_call_id: str | None = None,
        image_sources: Sequence[ImageSource] | None = None,
        *,
        image_token: str | None = None,
    ) -> None:
        self._set_content(content, image_sources, image_token)
        self._tool_call_id = tool_call_id

    def answering(self, tool_call_id: str | None) -> ToolMessage:
        """Return the same result as the answer to another call id."""
        message = ToolMessage("", tool_call_id)
        Message.__init__(message, self._segments, self._image_sources, self._image_token)
        return message

    @property
    def tool_call_id(self) -> str | None:
        return self._tool_call_id


class LatestReminderMessage(Message):
    """A reminder message that carries additional instructions."""

    __slots__ = ()
    _role = "latest_reminder"

    def __init__(self, content: str) -> None:
        require_str("content", content)
        super().__init__((content,))
