"""The Responses request body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.conversation.image_source import ImageDetail
from deepinfer_recipe.protocols.common.body import Body, UInt8, UInt32, parse_body
from deepinfer_recipe.protocols.common.builder import RequestedEffort


class TextPart(Body):
    type: Literal["input_text", "output_text"]
    text: str


class InputTextPart(Body):
    type: Literal["input_text"]
    text: str


class ImagePart(Body):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None


class FilePart(Body):
    type: Literal["input_file"]
    file_data: Any = None
    file_id: Any = None
    file_url: Any = None
    filename: Any = None


Part = Annotated[TextPart | ImagePart | FilePart, Field(discriminator="type")]
OutputPart = Annotated[InputTextPart | ImagePart | FilePart, Field(discriminator="type")]


class MessageItem(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class ReasoningText(Body):
    text: str


class ReasoningItem(Body):
    content: list[ReasoningText] | None = None
    encrypted_content: Any = None


class FunctionCallItem(Body):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CallOutputItem(Body):
    call_id: str | None = None
    output: str | list[OutputPart]


class CustomCallOutputItem(Body):
    call_id: str
    output: str | list[OutputPart] | None = None


class CustomCallItem(Body):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class ToolSearchCallItem(Body):
    call_id: str
    execution: Literal["client", "server"] | None = None
    arguments: dict[str, Any]


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class CustomTool(Body):
    type: Literal["custom"]
    name: str
    description: Any = None
    format: Any = None


class NamespaceTool(Body):
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


class ToolSearchTool(Body):
    type: Literal["tool_search"]
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: Any = None


WEB_SEARCH_KINDS = ("web_search", "web_search_2025_08_26")


class WebSearchTool(Body):
    model_config = ConfigDict(extra="allow")

    type: str
    search_context_size: Any = None
    user_location: Any = None


Tool = FunctionTool | CustomTool | NamespaceTool | ToolSearchTool | WebSearchTool


class AnyTool(Body):
    type: str


class AdditionalToolsItem(Body):
    """More tools, declared where they become known; read like those of the request."""

    tools: Any = None


class ToolSearchOutputItem(Body):
    call_id: str
    execution: Literal["client", "server"] | None = None
    tools: list[Any]
    unsupported: Any = None
    """Where the first tool of an unknown kind stands; set by `parse_items`."""


Item = (
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CallOutputItem
    | CustomCallOutputItem
    | CustomCallItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | AdditionalToolsItem
)
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomCallOutputItem,
    "tool_search_call": ToolSearchCallItem,
    "tool_search_output": ToolSearchOutputItem,
    "additional_tools": AdditionalToolsItem,
}
_TOOLS: dict[str, type[Tool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
    "tool_search": ToolSearchTool,
}


class NamedChoice(Body):
    type: Literal["function", "custom"]
    name: str


class AllowedTool(Body):
    type: Literal["function", "custom"]
    name: str


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class WebSearchChoice(Body):
    type: Literal["web_search", "web_search_2025_08_26"]


class Reasoning(Body):
    effort: RequestedEffort | None = None
    summary: Any = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    name: str
    schema_: Any = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class Text(Body):
    format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
    ] = TextFormat(type="text")
    verbosity: Any = None


class ResponsesBody(Body):
    """A Responses request as clients send it; unknown fields are ignored."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    reasoning: Reasoning | None = None
    text: Text | None = None
    tools: list[Any] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedChoice | AllowedToolsChoice | WebSearchChoice, Field(discriminator="type")]
        | None
    ) = None
    max_output_tokens: UInt32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: UInt8 | None = None
    stream: bool | None = None
    user: str | None = None
    max_tool_calls: Any = None
    previous_response_id: Any = None
    store: Any = None
    include: Any = None
    metadata: Any = None


def _typed(place: str, model: type[Any], value: Any) -> Any:
    try:
        return parse_body(model, value)
    except RequestParseError as error:
        param = f"{place}.{error.param}" if error.param else place
        raise RequestParseError(f"{error} in {place}", param=param) from None


def unknown_items(items: list[Any]) -> set[str]:
    """Kinds of items that `parse_items` drops."""
    kinds = {item.get("type", "message") for item in items if isinstance(item, dict)}
    return {kind for kind in kinds if isinstance(kind, str)} - set(_ITEMS)


def parse_items(
    items: list[Any], earlier: int = 0, refused: Mapping[str, str] | None = None
) -> list[tuple[int, Item]]:
    """The items this codec knows, with their place in the list; others are dropped, or refused.

    earlier: how many stand before the request's own; those have places below zero.
    refused: kinds that are an error, with advice.
    """
    known: list[tuple[int, Item]] = []
    for index, item in enumerate(items, start=-earlier):
        place = f"input[{index}]"
        if not isinstance(item, dict) or not ("type" in item or "role" in item):
            raise RequestParseError(
                f"invalid request body: invalid input item, expected an object with a type or a "
                f"role (at {place})",
                param=place,
            )
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise RequestParseError(
                f"invalid request body: expected a string as type (at {place}.type)",
                param=f"{place}.type",
            )
        model = _ITEMS.get(kind)
        if model is None:
            if refused and kind in refused:
                raise RequestParseError(
                    f"{place}.type: `{kind}` is not supported; {refused[kind]}",
                    param=f"{place}.type",
                )
            continue
        parsed = _typed(place, model, item)
        if isinstance(parsed, ToolSearchOutputItem):
            found = parse_tools(parsed.tools, f"{place}.tools")
            known_places = {place for place, _ in found}
            unknown = next((n for n in range(len(parsed.tools)) if n not in known_places), None)
            parsed = parsed.model_copy(update={"tools": found, "unsupported": unknown})
        known.append((index, parsed))
    return known


def parse_tools(
    tools: list[Any], place: str = "tools", *, refuses_others: bool = False
) -> list[tuple[int, Tool]]:
    """The tools this codec knows, with their place in the list; others are dropped, or refused."""
    known: list[tuple[int, Tool]] = []
    for index, tool in enumerate(tools):
        here = f"{place}[{index}]"
        kind = _typed(here, AnyTool, tool).type
        model = _TOOLS.get(kind)
        if model is None and kind in WEB_SEARCH_KINDS:
            model = WebSearchTool
        if model is not None:
            known.append((index, _typed(here, model, tool)))
        elif refuses_others:
            raise RequestParseError(
                f"{here}.type: this server has no tool of type `{kind:.60}`; known are "
                f"{', '.join(f'`{name}`' for name in (*_TOOLS, WEB_SEARCH_KINDS[0]))}",
                param=f"{here}.type",
            )
    return known
