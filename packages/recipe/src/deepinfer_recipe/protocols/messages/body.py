"""The Messages request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from deepinfer_recipe.protocols.common.body import Body, Declaration, UInt32, UInt64
from deepinfer_recipe.protocols.common.builder import RequestedEffort, ThinkingType


class TextBlock(Body):
    type: Literal["text"]
    text: str


class Base64Source(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Body):
    type: Literal["url"]
    url: str


class FileSource(Body):
    type: Literal["file"]
    file_id: str


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type")]


class DocumentSource(Body):
    type: Any = None
    media_type: str | None = None
    data: Any = None


class DocumentBlock(Body):
    type: Literal["document"]
    source: DocumentSource
    title: Any = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Thinking that only its provider can read; to this server it says nothing."""

    type: Literal["redacted_thinking"]
    data: str


class SearchResultBlock(Body):
    """A text with its source, which the client found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: list[TextBlock]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any


class ToolReference(Body):
    type: Literal["tool_reference"]
    tool_name: str


class AddedTool(Body):
    type: Literal["tool_reference"]
    name: str


class ToolAdditionBlock(Body):
    type: Literal["tool_addition"]
    tool: AddedTool


ResultPart = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference,
    Field(discriminator="type"),
]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None


class ServerToolUseBlock(Body):
    type: Literal["server_tool_use"]
    id: str
    name: str
    input: Any


class WebSearchResultBlock(Body):
    type: Literal["web_search_tool_result"]
    tool_use_id: str
    content: Any


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ToolAdditionBlock
    | ServerToolUseBlock
    | WebSearchResultBlock,
    Field(discriminator="type"),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ServerTool(Body):
    """A tool with a type: the server's own, or one that says it is custom."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    description: Any = None
    input_schema: Any = None
    strict: Any = None
    defer_loading: Any = None


class Tool(Declaration):
    name: str
    description: str | None = None
    input_schema: Any = None
    strict: Any = None
    defer_loading: bool | None = None


def _tool_kind(value: Any) -> str:
    is_server = isinstance(value, ServerTool) or (isinstance(value, dict) and "type" in value)
    return "server" if is_server else "client"


AnyTool = Annotated[
    Annotated[Tool, Tag("client")] | Annotated[ServerTool, Tag("server")],
    Discriminator(_tool_kind),
]


class AutoChoice(Body):
    type: Literal["auto"]


class AnyChoice(Body):
    type: Literal["any"]


class NoChoice(Body):
    type: Literal["none"]


class ToolChoice(Body):
    type: Literal["tool"]
    name: str


class Thinking(Body):
    type: ThinkingType
    budget_tokens: UInt64 | None = None


class OutputConfig(Body):
    effort: RequestedEffort | None = None
    format: Any = None


class Metadata(Body):
    user_id: str | None = None


class MessagesBody(Body):
    """A Messages request as clients send it; unknown fields are ignored."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    max_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[AnyTool] | None = None
    tool_choice: (
        Annotated[AutoChoice | AnyChoice | NoChoice | ToolChoice, Field(discriminator="type")]
        | None
    ) = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
