"""Tool declarations, tool choice, and the constraint that follows from them."""

from __future__ import annotations

import marshal
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.base.json_text import compact_json
from deepinfer_recipe.conversation.inference import OutputConstraint
from deepinfer_recipe.conversation.messages import ToolChoice
from deepinfer_recipe.conversation.policy import PARITY, Policy
from deepinfer_recipe.conversation.tool_types import ToolDefinition
from deepinfer_recipe.protocols.common.schema_check import require_schema
from deepinfer_recipe.protocols.common.strict_schema import StrictRules

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")


@dataclass(frozen=True, slots=True)
class Forced:
    """The choice of one tool by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The choice among some tools by name (extended profile)."""

    names: tuple[str, ...]
    mode: Literal["auto", "required"]


Choice: TypeAlias = Literal["auto", "none", "required"] | Forced | Allowed


def check_name(name: str, param: str) -> None:
    """Raise `ConversionError` unless `name` may name a tool."""
    if not name:
        raise ConversionError(
            f"Invalid '{param}': empty string. Expected a string with minimum length 1, but got "
            "an empty string instead.",
            param=param,
        )
    if not _NAME.match(name):
        raise ConversionError(
            f"Invalid '{param}': string does not match pattern. Expected a string that matches "
            "the pattern '^[a-zA-Z0-9_-]+$'.",
            param=param,
        )
    if len(name) > MAX_NAME_CHARS:
        raise ConversionError(
            f"Invalid '{param}': string too long. Expected a string with maximum length "
            f"{MAX_NAME_CHARS}, but got a string with length {len(name)} instead.",
            param=param,
        )


def checked_parameters(
    name: str, parameters: Any, param: str, *, strict: bool = False, policy: Policy = PARITY
) -> Any:
    """The parameters of a function: an object schema, or `{}` when there are none.

    Strict parameters are closed: see `StrictRules`.
    """
    if strict:
        rules = StrictRules(
            shape_error="Invalid tool parameters schema : ",
            root_name="function parameters schema",
            allows_empty_root=True,
            keeps_keywords=policy.keeps_strict_keywords,
            param=param,
        )
        return rules.normalise({"type": "object"} if parameters is None else parameters)
    if parameters is None:
        return {}
    what = f"Invalid schema for function '{name}'"
    require_schema(parameters, what, param)
    kind = parameters.get("type") if isinstance(parameters, dict) else None
    if kind != "object":
        shown = "null" if kind is None else compact_json(kind)
        raise ConversionError(
            f"{what}: schema must be a JSON Schema of 'type: \"object\"', got 'type: {shown}'.",
            param=param,
        )
    return parameters


def checked_tool(
    name: str,
    description: str | None,
    parameters: Any,
    param: str,
    *,
    strict: bool | None,
    policy: Policy,
    defer_loading: bool = False,
) -> ToolDefinition:
    """A tool with its parameters checked. Raises `ConversionError` naming `param`."""
    checked = checked_parameters(name, parameters, param, strict=bool(strict), policy=policy)
    return ToolDefinition(name, description, checked, strict, defer_loading)


_MAX_DEFINITIONS = 1024
_MAX_KEY_BYTES = 65536
_definitions: OrderedDict[bytes, ToolDefinition] = OrderedDict()


def define(
    name: str,
    description: str | None,
    parameters: Any,
    param: str,
    *,
    strict: bool | None,
    policy: Policy,
    defer_loading: bool = False,
) -> ToolDefinition:
    """A checked tool. The same declaration, sent again, is the same object.

    For tools that are not recognised as part of a list (see `tool_lists`). The bytes of
    `marshal` (version 2: no sharing, so equal values give equal bytes) are the cheapest exact
    key; they are never read back.
    """
    declaration = (name, description, parameters, strict, policy.name, defer_loading)
    key = marshal.dumps(declaration, 2)
    known = _definitions.get(key)
    if known is not None:
        return known
    tool = checked_tool(
        name,
        description,
        parameters,
        param,
        strict=strict,
        policy=policy,
        defer_loading=defer_loading,
    )
    if len(key) <= _MAX_KEY_BYTES:
        _definitions[key] = tool
        if len(_definitions) > _MAX_DEFINITIONS:
            _definitions.popitem(last=False)
    return tool


def check_unique(names: Sequence[str]) -> None:
    """Raise `ConversionError` if two tools share a name."""
    if len(set(names)) != len(names):
        raise ConversionError("Tool names must be unique.", param="tools")


def _check_same_strictness(tools: Sequence[ToolDefinition]) -> None:
    """Raise `ConversionError` if strict and other tools are mixed."""
    if len({bool(tool.strict) for tool in tools}) > 1:
        raise ConversionError(
            "Cannot use strict tool with non-strict tool in the same request", param="tools"
        )


def refuse_forced(choice: Choice) -> None:
    """Raise `ConversionError` if the choice forces a call; for a request without tools."""
    if (
        choice == "required"
        or isinstance(choice, Forced)
        or (isinstance(choice, Allowed) and choice.mode == "required")
    ):
        raise ConversionError(
            "tool_choice forces a call, but the request leaves the model no tool: declare it in "
            "`tools`, or leave tool_choice out",
            param="tool_choice",
        )


def resolve_choice(
    tools: Sequence[ToolDefinition], choice: Choice, *, may_force: bool
) -> tuple[list[ToolDefinition], ToolChoice]:
    """Apply the tool choice: the tools that stay, and auto, none or required.

    may_force: whether a call may be required at all.
    """
    if choice == "none":
        return [], "none"
    if not tools:
        return [], "auto"
    if isinstance(choice, Forced):
        kept = [tool for tool in tools if tool.name == choice.name]
        if not kept:
            raise ConversionError(
                f"Invalid value for 'tool_call': no function named '{choice.name}' was "
                "specified in the 'tools' parameter.",
                param="tool_choice",
            )
        tools, mode = kept, "required"
    elif isinstance(choice, Allowed):
        missing = set(choice.names) - {tool.name for tool in tools}
        if missing:
            raise ConversionError(
                f"tool_choice allows tools that are not declared: {', '.join(sorted(missing))}",
                param="tool_choice",
            )
        tools = [tool for tool in tools if tool.name in choice.names]
        mode = choice.mode
    else:
        mode = choice
    if mode == "required" and not may_force:
        raise ConversionError(
            "Thinking mode does not support this tool_choice", param="tool_choice"
        )
    # Of the tools that stay: what a forced one leaves out may be of the other kind.
    _check_same_strictness(tools)
    return list(tools), mode


def tool_constraint(tools: Sequence[ToolDefinition], mode: ToolChoice) -> OutputConstraint:
    """The constraint that keeps calls within the declared tools."""
    kind = "tool_call_required" if mode == "required" else "tool_call"
    return OutputConstraint(kind, f"[{','.join([tool.constraint_json for tool in tools])}]")
