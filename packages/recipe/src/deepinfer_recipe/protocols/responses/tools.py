"""Tools of a Responses request: functions, namespaces, custom tools, tool search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.conversation.tool_types import InputGrammar, ToolDefinition
from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat
from deepinfer_recipe.protocols.common import web_search
from deepinfer_recipe.protocols.common.options import ConversionOptions, WebSearchBehavior
from deepinfer_recipe.protocols.common.tools import check_name, checked_parameters, define
from deepinfer_recipe.protocols.responses import body as wire

APPLY_PATCH = "apply_patch"
TOOL_SEARCH = "tool_search"
_INPUT = "The whole input of the tool, as plain text."
_APPLY_PATCH_DESCRIPTION = """Edit files by sending one patch as the `input`.
A patch starts with the line `*** Begin Patch` and ends with the line `*** End Patch`. Between \
them stand one or more sections, each opened by one of these lines:
- `*** Add File: path` creates a file; every line that follows starts with `+`.
- `*** Delete File: path` removes a file; nothing follows.
- `*** Update File: path` changes a file; a line `*** Move to: new path` may follow to rename it.
An update holds hunks. A hunk starts with `@@`, optionally followed by the class or function it \
lies in, and shows a few unchanged lines of context around the change: unchanged lines start \
with a space, removed lines with `-`, new lines with `+`. Paths are relative."""
_APPLY_PATCH_INPUT_DESCRIPTION = "The whole patch, from `*** Begin Patch` to `*** End Patch`."


def _string_tool(
    name: str, description: str, input_description: str, grammar: InputGrammar | None = None
) -> ToolDefinition:
    parameters = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"input": {"type": "string", "description": input_description}},
        "required": ["input"],
    }
    return ToolDefinition(name, description, parameters, input_grammar=grammar)


def _grammar(requested: Any, place: str) -> InputGrammar | None:
    """The `format` of a custom tool: any text, or text that matches a grammar."""
    if requested is None or requested == {"type": "text"}:
        return None
    wanted = (
        f"{place}: expected an object of type `text`, or of type `grammar` with a `syntax` "
        "(`lark` or `regex`) and a non-empty `definition`"
    )
    if not isinstance(requested, dict) or requested.get("type") != "grammar":
        raise ConversionError(wanted, param=place)
    syntax, definition = requested.get("syntax"), requested.get("definition")
    if syntax not in ("lark", "regex"):
        raise ConversionError(wanted, param=f"{place}.syntax")
    if not isinstance(definition, str) or not definition:
        raise ConversionError(wanted, param=f"{place}.definition")
    return InputGrammar(syntax, definition)


def _custom(tool: wire.CustomTool, place: str, policy: Policy) -> ToolDefinition:
    if tool.name == APPLY_PATCH:
        return _string_tool(APPLY_PATCH, _APPLY_PATCH_DESCRIPTION, _APPLY_PATCH_INPUT_DESCRIPTION)
    if not policy.accepts_custom_tools:
        raise ConversionError(
            f"Unsupported custom tool: '{tool.name}'. Only 'apply_patch' is supported.",
            param=place,
        )
    check_name(tool.name, f"{place}.name")
    description = tool.description if isinstance(tool.description, str) else ""
    grammar = _grammar(tool.format, f"{place}.format")
    return _string_tool(tool.name, description, _INPUT, grammar)


def _named_custom(
    tool: wire.CustomTool, name: str, description: str | None, place: str
) -> ToolDefinition:
    return _string_tool(name, description or "", _INPUT, _grammar(tool.format, f"{place}.format"))


def _function(
    tool: wire.FunctionTool,
    name: str,
    description: str | None,
    place: str,
    policy: Policy,
    *,
    checks_schemas: bool,
) -> ToolDefinition:
    if not checks_schemas:
        return ToolDefinition(name, description, tool.parameters, tool.strict)
    return define(
        name,
        description,
        tool.parameters,
        f"{place}.parameters",
        strict=tool.strict,
        policy=policy,
    )


def full_name(namespace: str, own: str, form: PromptFormat) -> str:
    """The name under which the model sees a function of a namespace."""
    return f"{namespace}{form.namespace_separator}{own}"


@dataclass(frozen=True, slots=True)
class NamespacedTool:
    """A function of a namespace: the names and the description that the model sees."""

    tool: wire.FunctionTool | wire.CustomTool
    namespace: str
    full_name: str
    description: str | None
    place: str


def namespaced(
    tool: wire.NamespaceTool,
    place: str,
    form: PromptFormat,
    taken: set[str],
    *,
    takes_custom: bool = True,
) -> Iterator[NamespacedTool]:
    """The functions of a namespace, names checked.

    A namespace may be listed twice: a full name that is `taken` gets a number.
    """
    check_name(tool.name, f"{place}.name")
    seen: set[str] = set()
    for index, member in enumerate(tool.tools):
        here = f"{place}.tools[{index}]"
        if isinstance(member, wire.CustomTool) and not takes_custom:
            raise ConversionError(
                "Currently custom tools are not allowed inside a namespace. Found custom tool "
                f"'{member.name}' in {here}.",
                param=here,
            )
        check_name(member.name, f"{here}.name")
        if member.name in seen:
            raise ConversionError("Tool names within a namespace must be unique.", param=place)
        seen.add(member.name)
        described = member.description
        description = described if isinstance(described, str) else None
        if tool.description and form.describes_namespaces:
            description = f"{tool.description}\n{description or ''}"
        first = name = full_name(tool.name, member.name, form)
        number = 0
        while name in taken:
            number += 1
            name = f"{first}_{number}"
        taken.add(name)
        yield NamespacedTool(member, tool.name, name, description, here)


def definitions(
    tools: Iterable[tuple[int, wire.Tool]],
    form: PromptFormat,
    options: ConversionOptions,
    policy: Policy,
    *,
    checks_schemas: bool = True,
    within: str = "tools",
) -> list[ToolDefinition]:
    """The tools the model sees. Without `checks_schemas` only names and kinds are checked.

    within: where the list stands, for errors.
    """
    defined: list[ToolDefinition] = []
    taken: set[str] = set()
    for index, tool in tools:
        place = f"{within}[{index}]"
        if isinstance(tool, wire.FunctionTool):
            check_name(tool.name, f"{place}.name")
            defined.append(
                _function(
                    tool, tool.name, tool.description, place, policy, checks_schemas=checks_schemas
                )
            )
        elif isinstance(tool, wire.CustomTool):
            defined.append(_custom(tool, place, policy))
        elif isinstance(tool, wire.NamespaceTool):
            defined += [
                _function(
                    m.tool,
                    m.full_name,
                    m.description,
                    m.place,
                    policy,
                    checks_schemas=checks_schemas,
                )
                if isinstance(m.tool, wire.FunctionTool)
                else _named_custom(m.tool, m.full_name, m.description, m.place)
                for m in namespaced(
                    tool, place, form, taken, takes_custom=policy.reads_newer_blocks
                )
            ]
        elif isinstance(tool, wire.ToolSearchTool):
            if tool.execution == "client" and form.system_in_place:
                parameters = checked_parameters(TOOL_SEARCH, tool.parameters, f"{place}.parameters")
                defined.append(ToolDefinition(TOOL_SEARCH, tool.description, parameters))
        elif options.responses_web_search is WebSearchBehavior.Run and policy.runs_server_tools:
            defined.append(web_search.definition())
        elif options.responses_web_search is WebSearchBehavior.Reject:
            raise ConversionError("Server tools are not supported", param=place)
    return defined


def namespace_map(
    tools: Iterable[tuple[int, wire.Tool]], form: PromptFormat
) -> dict[str, tuple[str, str]]:
    """Full name of each namespaced function -> (namespace, own name)."""
    taken: set[str] = set()
    return {
        member.full_name: (member.namespace, member.tool.name)
        for index, tool in tools
        if isinstance(tool, wire.NamespaceTool)
        for member in namespaced(tool, f"tools[{index}]", form, taken)
    }


def custom_names(tools: Iterable[tuple[int, wire.Tool]], form: PromptFormat) -> tuple[str, ...]:
    """Names under which the model sees the custom tools, those in namespaces too."""
    taken: set[str] = set()
    names: list[str] = []
    for index, tool in tools:
        if isinstance(tool, wire.CustomTool):
            names.append(tool.name)
        elif isinstance(tool, wire.NamespaceTool):
            names += [
                member.full_name
                for member in namespaced(tool, f"tools[{index}]", form, taken)
                if isinstance(member.tool, wire.CustomTool)
            ]
    return tuple(names)


def echoed(tool: wire.Tool) -> dict[str, Any]:
    """A tool as a response reports it."""
    if isinstance(tool, wire.FunctionTool):
        return {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
    if isinstance(tool, wire.CustomTool):
        return {"type": "custom", "name": tool.name}
    if isinstance(tool, wire.NamespaceTool):
        return {
            "type": "namespace",
            "name": tool.name,
            "description": tool.description,
            "tools": [echoed(member) for member in tool.tools],
        }
    if isinstance(tool, wire.ToolSearchTool):
        return {
            "type": "tool_search",
            "execution": tool.execution,
            "description": tool.description,
            "parameters": tool.parameters,
        }
    return {
        "type": tool.type,
        "search_context_size": tool.search_context_size,
        "user_location": tool.user_location,
    }
