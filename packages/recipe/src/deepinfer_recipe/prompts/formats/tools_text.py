"""The explanation of tool calls that both formats put into the system part."""

from __future__ import annotations

TOOLS_BLOCK_TAIL = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke "
    "tool calls.\n"
)


def tools_block_head(calls: str, invoke: str, parameter: str) -> str:
    """The text before the tool lines, with the format's own tag names in its example."""
    dsml = "｜DSML｜"
    return (
        "\n\n## Tools\n\n"
        "You have access to a set of tools to help answer the user's question. You can invoke "
        f'tools by writing a "<{dsml}{calls}>" block like the following:\n\n'
        f"<{dsml}{calls}>\n"
        f'<{dsml}{invoke} name="$TOOL_NAME">\n'
        f'<{dsml}{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        f"</{dsml}{parameter}>\n"
        "...\n"
        f"</{dsml}{invoke}>\n"
        f'<{dsml}{invoke} name="$TOOL_NAME2">\n'
        "...\n"
        f"</{dsml}{invoke}>\n"
        f"</{dsml}{calls}>\n\n"
        'String parameters should be specified as is and set `string="true"`. For all other '
        "types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
        '`string="false"`.\n\n'
        "If thinking_mode is enabled (triggered by <think>), you MUST output your complete "
        "reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\n"
        "Otherwise, output directly after </think> with tool calls or final response.\n\n"
        "### Available Tool Schemas\n\n"
    )
