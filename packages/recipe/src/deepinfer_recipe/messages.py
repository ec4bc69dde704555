"""What a conversation is: messages, tools, picture sources.

All types are immutable values. A message's text may hold picture placeholders: it is kept as
the pieces of text between them, so that a placeholder is never confused with the same
characters typed by a user.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.json_text import compact_json, prompt_json
from deepinfer_recipe.special_tokens import SpecialToken

ToolChoice: TypeAlias = Literal["auto", "none", "required"]
ReasoningEffort: TypeAlias = Literal["low", "high", "xhigh", "max"]
ResponseFormat: TypeAlias = Literal["text", "json_object", "json_schema", "regex"]
ImageDetail: TypeAlias = Literal["low", "high", "original", "auto"]
Role: TypeAlias = Literal["system", "user", "assistant", "tool", "latest_reminder"]
ImageSourceKind: TypeAlias = Literal["data_url", "url", "bytes"]

IMAGE_TOKEN = SpecialToken.Image.value


def _require_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"argument '{name}' must be str, got {type(value).__name__}")


class _Value:
    """Equality and repr over `__slots__` for small immutable values."""

    __slots__ = ()

    def _key(self) -> tuple[Any, ...]:
        names = [n for c in type(self).__mro__ for n in getattr(c, "__slots__", ())]
        return tuple(getattr(self, n) for n in names)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]  # parameters may hold dicts


class ToolCall(_Value):
    """A historical tool call and its arguments."""

    __slots__ = ("_arguments", "_id", "_name")

    def __init__(self, id: str, name: str, arguments: str) -> None:
        _require_str("id", id)
        _require_str("name", name)
        _require_str("arguments", arguments)
        self._id = id
        self._name = name
        self._arguments = arguments

    @property
    def id(self) -> str:
        """The id that the answering tool message repeats."""
        return self._id

    @property
    def name(self) -> str:
        """Name of the function called."""
        return self._name

    @property
    def arguments(self) -> str:
        """Caller-supplied arguments, expected to encode a JSON object; not validated."""
        return self._arguments

    def __repr__(self) -> str:
        return f"ToolCall({self._id!r}, {self._name!r}, {self._arguments!r})"


class ToolDefinition(_Value):
    """A client tool definition.

    `strict` is passed through. Direct construction does not normalize `parameters`, unlike
    conversion, which normalizes the parameters of a tool with `strict: true`.
    """

    __slots__ = (
        "_constraint",
        "_defer_loading",
        "_description",
        "_line",
        "_name",
        "_parameters",
        "_strict",
    )

    def __init__(
        self,
        name: str,
        description: str | None = None,
        parameters: Any = None,
        strict: bool | None = None,
        defer_loading: bool = False,
    ) -> None:
        _require_str("name", name)
        self._name = name
        self._description = description
        self._parameters = parameters
        self._strict = strict
        self._defer_loading = defer_loading
        # Made on first use: tools are shared by the requests of a session.
        self._line: str | None = None
        self._constraint: str | None = None

    def _key(self) -> tuple[Any, ...]:
        return (self._name, self._description, self._parameters, self._strict, self._defer_loading)

    @property
    def prompt_line(self) -> str:
        """The JSON line that announces the tool in a prompt."""
        if self._line is None:
            self._line = prompt_json(
                {
                    "name": self._name,
                    "description": self._description or "",
                    "parameters": self._parameters,
                }
            )
        return self._line

    @property
    def constraint_json(self) -> str:
        """The tool as a constraint on the output lists it: compact JSON of a Chat tool."""
        if self._constraint is None:
            entry: dict[str, Any] = {
                "type": "function",
                "function": {
                    "name": self._name,
                    "description": self._description,
                    "parameters": self._parameters,
                    "strict": self._strict,
                },
            }
            if self._defer_loading:
                entry["defer_loading"] = True
            self._constraint = compact_json(entry)
        return self._constraint

    @property
    def name(self) -> str:
        """Name of the function."""
        return self._name

    @property
    def description(self) -> str | None:
        """What the tool is for; None renders as an empty string."""
        return self._description

    @property
    def parameters(self) -> Any:
        """Input JSON Schema of the tool."""
        return self._parameters

    @property
    def strict(self) -> bool | None:
        """The `strict` setting, passed through without normalizing `parameters`."""
        return self._strict

    @property
    def defer_loading(self) -> bool:
        """Whether the tool is announced later, by a system message, not at the top."""
        return self._defer_loading

    def __repr__(self) -> str:
        return f"ToolDefinition({self._name!r}, {self._description!r}, {self._parameters!r})"


class ImageSource(_Value):
    """Base class of the image sources supplied with a conversation.

    Every source records a `path`: the request location of the image as error messages report
    it, such as `messages.0.content[1]`. Conversion fills it; a source constructed directly has
    an empty path unless the `path` keyword supplies one.
    """

    __slots__ = ("_content", "_detail", "_path")
    _kind: ImageSourceKind

    def __init__(self, content: str | bytes, detail: ImageDetail, path: str) -> None:
        if detail not in ("low", "high", "original", "auto"):
            raise ValueError(
                f'invalid detail "{detail}"; expected "low", "high", "original", or "auto"'
            )
        self._content = content
        self._detail: ImageDetail = detail
        self._path = path

    @property
    def kind(self) -> ImageSourceKind:
        """Which of `data_url`, `url` and `data` is set."""
        return self._kind

    @property
    def detail(self) -> ImageDetail:
        """Requested resolution."""
        return self._detail

    @property
    def data_url(self) -> str | None:
        """The data URL of a data URL source, else None."""
        return None

    @property
    def url(self) -> str | None:
        """The URL of an external source, else None."""
        return None

    @property
    def data(self) -> bytes | None:
        """The encoded bytes of a bytes source, else None."""
        return None

    @property
    def path(self) -> str:
        """Request location of the image; empty when the source has none."""
        return self._path

    def __repr__(self) -> str:
        return f"{type(self).__name__}(detail={self._detail!r}, path={self._path!r})"


class DataUrlImageSource(ImageSource):
    """An image referenced by a data URL with a base64 or percent-encoded body."""

    __slots__ = ()
    _kind = "data_url"

    def __init__(self, data_url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        _require_str("data_url", data_url)
        super().__init__(data_url, detail, path)

    @property
    def data_url(self) -> str:
        return str(self._content)


class UrlImageSource(ImageSource):
    """An image referenced by an external URL."""

    __slots__ = ()
    _kind = "url"

    def __init__(self, url: str, detail: ImageDetail = "high", *, path: str = "") -> None:
        _require_str("url", url)
        super().__init__(url, detail, path)

    @property
    def url(self) -> str:
        return str(self._content)


class BytesImageSource(ImageSource):
    """An image supplied as encoded bytes."""

    __slots__ = ()
    _kind = "bytes"

    def __init__(self, data: bytes, detail: ImageDetail = "high", *, path: str = "") -> None:
        super().__init__(bytes(data), detail, path)

    @property
    def data(self) -> bytes:
        return self._content  # type: ignore[return-value]


def split_placeholders(content: str, count: int, image_token: str | None) -> tuple[str, ...]:
    """Cut `content` at the first `count` spellings of the image token."""
    if image_token == "":
        raise ValueError("image_token must not be empty")
    if not count:
        return (content,)
    return tuple(content.split(image_token or IMAGE_TOKEN, count))


class Message(_Value):
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
        _require_str("content", content)
        sources = list(image_sources or ())
        segments = split_placeholders(content, len(sources), image_token)
        super().__init__(segments, sources, image_token)
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
        _require_str("content", content)
        sources = list(image_sources or ())
        segments = split_placeholders(content, len(sources), image_token)
        super().__init__(segments, sources, image_token)


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
        _require_str("content", content)
        super().__init__((content,))
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
        _require_str("content", content)
        sources = list(image_sources or ())
        segments = split_placeholders(content, len(sources), image_token)
        super().__init__(segments, sources, image_token)
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
        _require_str("content", content)
        super().__init__((content,))
