"""Tools and tool choice of a Messages request."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.conversation.tool_types import ToolDefinition
from deepinfer_recipe.protocols.common.builder import RequestBuilder
from deepinfer_recipe.protocols.common.options import WebSearchBehavior
from deepinfer_recipe.protocols.common.schema_check import require_schema
from deepinfer_recipe.protocols.common.tools import (
    Choice,
    Forced,
    check_name,
    check_unique,
    checked_tool,
)
from deepinfer_recipe.protocols.common.web_search import WEB_SEARCH, definition, server_tool
from deepinfer_recipe.protocols.messages import body as wire
from deepinfer_recipe.protocols.messages.provider_tools import provider_tool


def tool_choice(body: wire.MessagesBody, dropped: set[str], policy: Policy) -> Choice:
    """What the request chooses; a dropped server tool cannot be forced."""
    requested = body.tool_choice
    if isinstance(requested, wire.NoChoice):
        return "none"
    if isinstance(requested, wire.ToolChoice) and requested.name not in dropped:
        return Forced(requested.name)
    if isinstance(requested, wire.AnyChoice) and policy.enforces_messages_choices:
        return "required"
    return "auto"


class ToolReader:
    """Reads the tools of one request: definitions for the model, and what was left out."""

    def __init__(self, builder: RequestBuilder, *, checks_schemas: bool) -> None:
        self._builder = builder
        self._checks_schemas = checks_schemas
        behavior = builder.options.messages_web_search
        runs = behavior is WebSearchBehavior.Run
        self._runs_search = runs and builder.policy.runs_server_tools
        self._drops_search = runs or behavior is WebSearchBehavior.Drop
        self.dropped: set[str] = set()
        """Names of server tools that were left out."""

    def read(self, declared: Sequence[wire.Tool | wire.ServerTool]) -> list[ToolDefinition]:
        """The tools that the model sees. Raises `ConversionError`."""
        tools = [
            tool
            for index, one in enumerate(declared)
            if (tool := self._tool(one, f"tools[{index}]")) is not None
        ]
        defers = self._builder.version.prompt_format.system_in_place
        if defers and tools and all(tool.defer_loading for tool in tools):
            raise ConversionError(
                "tools: at least one tool must have defer_loading=false. All tools cannot be "
                "deferred.",
                param="tools",
            )
        if self._checks_schemas:
            check_unique([tool.name for tool in tools])
        if not defers:  # V4 lists every tool at the top
            tools = [
                ToolDefinition(tool.name, tool.description, tool.parameters, tool.strict)
                for tool in tools
            ]
        return tools

    def _tool(self, tool: wire.Tool | wire.ServerTool, place: str) -> ToolDefinition | None:
        if isinstance(tool, wire.Tool):
            return self._client(tool, place)
        if tool.type.startswith("web_search"):
            if self._runs_search:
                return self._search(tool, place)
            if self._drops_search:
                self.dropped.add(str(tool.name))
                return None
        if self._builder.policy.accepts_custom_tools:
            if tool.type == "custom":
                return self._client(_custom(tool, place), place)
            declared = tool.model_dump(exclude_unset=True)
            provided = provider_tool(tool.type, declared)
            if provided is not None:
                check_name(tool.name or "", f"{place}.name")
                return ToolDefinition(tool.name or "", *provided)
            raise ConversionError(
                f"{place}.type: a tool of type `{tool.type:.60}` would run on the server, which "
                "has none; known are `custom`, `bash_*`, `text_editor_*`, `memory_*`, `computer_*`",
                param=f"{place}.type",
            )
        raise ConversionError(f"{place}: server tools are not supported", param=place)

    def _search(self, tool: wire.ServerTool, place: str) -> ToolDefinition:
        if tool.name != WEB_SEARCH:
            raise ConversionError(
                f"{place}.name: expected `{WEB_SEARCH}`, got {tool.name!r:.60}",
                param=f"{place}.name",
            )
        declaration = tool.model_dump(exclude_unset=True)
        limit = declaration.get("max_uses")
        self._builder.server_tools[WEB_SEARCH] = server_tool(
            "anthropic", declaration, limit, f"{place}.max_uses"
        )
        return definition()

    def _client(self, tool: wire.Tool, place: str) -> ToolDefinition:
        policy = self._builder.policy
        check_name(tool.name, f"{place}.name")
        parameters, place = tool.input_schema, f"{place}.input_schema"
        strict = True if policy.enforces_messages_choices and tool.strict is True else None
        late = bool(tool.defer_loading)
        if not self._checks_schemas:
            return ToolDefinition(tool.name, tool.description, parameters, strict, late)
        known = tool.definitions.get(policy.name)
        if known is None:
            if parameters is None:
                # Unlike the other protocols, parameters are not optional here.
                require_schema(None, f"Invalid schema for function '{tool.name}'", place)
            known = tool.definitions[policy.name] = checked_tool(
                tool.name,
                tool.description,
                parameters,
                place,
                strict=strict,
                policy=policy,
                defer_loading=late,
            )
        return known


def _custom(tool: wire.ServerTool, place: str) -> wire.Tool:
    """A tool that says it is custom is a client tool like any other."""
    try:
        return wire.Tool.model_validate(tool.model_dump(exclude={"type"}))
    except ValueError:
        raise ConversionError(
            f"{place}: a custom tool needs a name (a string) and may have a description (a "
            "string) and defer_loading (a boolean)",
            param=place,
        ) from None
