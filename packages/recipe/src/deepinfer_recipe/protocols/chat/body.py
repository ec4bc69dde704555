"""The Chat Completions request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from deepinfer_recipe.conversation.image_source import ImageDetail
from deepinfer_recipe.protocols.common.body import Body, Declaration, UInt8, UInt32, UInt64
from deepinfer_recipe.protocols.common.builder import RequestedEffort, ThinkingType


class TextPart(Body):
    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str
    detail: ImageDetail | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl


class FilePart(Body):
    type: Literal["file"]
    file_id: str | None = None
    file_data: str | None = None
    file: Any = None
    filename: Any = None


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]
Content = str | list[Part]


class CalledFunction(Body):
    name: str
    arguments: str


class Call(Body):
    id: str
    type: Literal["function"]
    function: CalledFunction


class SystemTurn(Body):
    role: Literal["system"]
    content: Content
    name: str | None = None


class DeveloperTurn(Body):
    role: Literal["developer"]
    content: Content
    name: str | None = None


class UserTurn(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantTurn(Body):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    prefix: bool | None = None
    name: str | None = None


class ToolTurn(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


class ReminderTurn(Body):
    role: Literal["latest_reminder"]
    content: str


Turn = Annotated[
    SystemTurn | DeveloperTurn | UserTurn | AssistantTurn | ToolTurn | ReminderTurn,
    Field(discriminator="role"),
]


class FunctionDeclaration(Declaration):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDeclaration


class ChosenFunction(Body):
    name: str


class FunctionChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


NamedChoice = Annotated[FunctionChoice | AllowedToolsChoice, Field(discriminator="type")]


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: str | None = None
    schema_: Any = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Body):
    type: Literal["regex"]
    regex: str


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat, Field(discriminator="type")
]


class Thinking(Body):
    type: ThinkingType


class StreamOptions(Body):
    include_usage: bool | None = None


class ChatBody(Body):
    """A Chat Completions request as clients send it; unknown fields are ignored."""

    model: str
    messages: list[Turn]
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: UInt32 | None = None
    max_completion_tokens: Any = None
    n: UInt8 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    response_format: ResponseFormat | None = None
    thinking: Thinking | None = None
    reasoning_effort: RequestedEffort | None = None
    seed: UInt64 | None = None
    logprobs: bool | None = None
    top_logprobs: UInt8 | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    user: Any = None
    user_id: Any = None
    # How other servers spell a switch of thinking; see `thinking_switch`.
    chat_template_kwargs: Any = None
    enable_thinking: Any = None
    reasoning: Any = None
    thinking_budget: Any = None
