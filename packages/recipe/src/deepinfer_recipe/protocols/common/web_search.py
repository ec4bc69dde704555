"""The web-search tool of Responses and Messages as a function that the model can call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.conversation.server_tools import DEFAULT_MAX_USES, Dialect, ServerTool
from deepinfer_recipe.conversation.tool_types import ToolDefinition

WEB_SEARCH = "web_search"


def definition() -> ToolDefinition:
    """What the model sees."""
    return ToolDefinition(
        WEB_SEARCH,
        "Search the web. Returns titles, addresses and excerpts of pages that match the query.",
        {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to search for, in plain words."}
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    )


def server_tool(
    dialect: Dialect, declaration: Mapping[str, Any], limit: Any, place: str
) -> ServerTool:
    """The tool with the client's limit on uses; `place` is where that limit stands."""
    if limit is None:
        limit = DEFAULT_MAX_USES
    if type(limit) is not int or limit < 1:
        raise ConversionError(f"{place}: expected a positive integer, got {limit!r}", param=place)
    return ServerTool(dialect, dict(declaration), limit)


def result_text(block: Mapping[str, Any]) -> str:
    """What a result block of a history tells in clear: titles and addresses."""
    content = block.get("content")
    if not isinstance(content, list):
        code = content.get("error_code") if isinstance(content, dict) else None
        return f"The search failed: {code or 'no result'}."
    lines = [
        f"{result.get('title') or 'Untitled'}\n{result.get('url') or ''}"
        for result in content
        if isinstance(result, dict)
    ]
    return "\n\n".join(lines) or "The search found nothing."
