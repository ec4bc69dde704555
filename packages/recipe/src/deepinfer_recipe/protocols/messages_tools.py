"""Tools and tool choice of a Messages request."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_recipe.errors import ConversionError
from deepinfer_recipe.options import Profile, WebSearchBehavior
from deepinfer_recipe.protocols import messages_body as wire
from deepinfer_recipe.protocols.draft import Draft
from deepinfer_recipe.protocols.schema_check import require_schema
from deepinfer_recipe.protocols.tools import (
    Choice,
    Forced,
    check_name,
    check_unique,
    checked_tool,
)
from deepinfer_recipe.protocols.web_search import WEB_SEARCH, definition, server_tool
from deepinfer_recipe.tool_types import ToolDefinition


def tool_choice(body: wire.MessagesBody, dropped: set[str], profile: Profile) -> Choice:
    """What the request chooses; a dropped server tool cannot be forced."""
    requested = body.tool_choice
    if isinstance(requested, wire.NoChoice):
        return "none"
    if isinstance(requested, wire.ToolChoice) and requested.name not in dropped:
        return Forced(requested.name)
    if isinstance(requested, wire.AnyChoice) and profile == "extended":
        return "required"
    return "auto"


def client_tools(
    declared: Sequence[wire.Tool | wire.ServerTool], draft: Draft, *, checks_schemas: bool
) -> tuple[list[ToolDefinition], set[str]]:
    """The client tools, and the names of dropped server tools."""
    tools: list[ToolDefinition] = []
    dropped: set[str] = set()
    drops_search = draft.options.messages_web_search in (
        WebSearchBehavior.Drop,
        WebSearchBehavior.Run,
    )
    is_extended = draft.profile == "extended"
    runs_search = draft.options.messages_web_search is WebSearchBehavior.Run and is_extended
    for index, tool in enumerate(declared):
        place = f"tools[{index}]"
        if isinstance(tool, wire.ServerTool):
            if runs_search and tool.type.startswith("web_search"):
                if tool.name != WEB_SEARCH:
                    raise ConversionError(
                        f"{place}.name: expected `{WEB_SEARCH}`, got {tool.name!r:.60}",
                        param=f"{place}.name",
                    )
                declaration = tool.model_dump(exclude_unset=True)
                limit = declaration.get("max_uses")
                draft.server_tools[WEB_SEARCH] = server_tool(
                    "anthropic", declaration, limit, f"{place}.max_uses"
                )
                tools.append(definition())
                continue
            if drops_search and tool.type.startswith("web_search"):
                dropped.add(str(tool.name))
                continue
            if not (is_extended and tool.type == "custom"):
                raise ConversionError(f"{place}: server tools are not supported", param=place)
            tool = _custom(tool, place)
        check_name(tool.name, f"{place}.name")
        parameters, place = tool.input_schema, f"{place}.input_schema"
        strict = True if is_extended and tool.strict is True else None
        late = bool(tool.defer_loading)
        if not checks_schemas:
            tools.append(ToolDefinition(tool.name, tool.description, parameters, strict, late))
            continue
        known = tool.definitions.get(draft.profile)
        if known is None:
            if parameters is None:
                # Unlike the other protocols, parameters are not optional here.
                require_schema(None, f"Invalid schema for function '{tool.name}'", place)
            known = tool.definitions[draft.profile] = checked_tool(
                tool.name,
                tool.description,
                parameters,
                place,
                strict=strict,
                profile=draft.profile,
                defer_loading=late,
            )
        tools.append(known)
    defers = draft.version.prompt_format.system_in_place  # V4 lists every tool at the top
    if defers and tools and all(tool.defer_loading for tool in tools):
        raise ConversionError(
            "tools: at least one tool must have defer_loading=false. All tools cannot be deferred.",
            param="tools",
        )
    if checks_schemas:
        check_unique([tool.name for tool in tools])
    if not draft.version.prompt_format.system_in_place:
        tools = [
            ToolDefinition(tool.name, tool.description, tool.parameters, tool.strict)
            for tool in tools
        ]
    return tools, dropped


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
