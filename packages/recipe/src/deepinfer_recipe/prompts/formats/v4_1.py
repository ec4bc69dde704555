"""DeepSeek V4.1: a number for the effort, system messages in place, pictures, late tools."""

from __future__ import annotations

from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat, template
from deepinfer_recipe.prompts.formats.tools_text import TOOLS_BLOCK_TAIL, tools_block_head


def _effort(level: int) -> str:
    return (
        f"Reasoning Effort: {level} "
        "(range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    )


_FORMAT_HEAD = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)

V4_1 = PromptFormat(
    name="v41",
    effort_texts={
        "low": _effort(50),
        "high": _effort(75),
        "xhigh": _effort(75),
        "max": _effort(100),
    },
    tools_block_head=template(tools_block_head(" calls", " invoke", " parameter")),
    tools_block_tail=template(TOOLS_BLOCK_TAIL),
    updated_tools_head="\n\n### Updated Tool Schemas\n\n",
    json_object_block=_FORMAT_HEAD + '{"type": "json_object"}',
    json_schema_head=_FORMAT_HEAD,
    calls_tag=" calls",
    invoke_tag=" invoke",
    parameter_tag=" parameter",
    empty_arguments_line="\n",
    system_in_place=True,
    drops_empty_parts=False,
    has_pictures=True,
    fills_missing_reasoning=True,
    namespace_separator="::",
    describes_namespaces=True,
    sorts_calls_by_id=False,
)
