"""DeepSeek V4: effort paragraphs, all system text in front, no pictures."""

from __future__ import annotations

from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat, template
from deepinfer_recipe.prompts.formats.tools_text import TOOLS_BLOCK_TAIL, tools_block_head

_EFFORT_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate "
    "step, considered alternative, and rejected hypothesis to ensure absolutely no assumption "
    "is left unchecked.\n\n"
)
_EFFORT_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every "
    "causal chain to its root, and resolve the underlying cause rather than any surface "
    "symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple "
    "angles and are certain that no assumption remains unchecked and no error remains "
    "undiscovered.\n\n"
)

V4 = PromptFormat(
    name="v4",
    effort_texts={
        "low": "",
        "high": _EFFORT_MAXIMUM,
        "xhigh": _EFFORT_MAXIMUM,
        "max": _EFFORT_BEYOND_MAXIMUM,
    },
    tools_block_head=template(tools_block_head("tool_calls", "invoke", "parameter")),
    tools_block_tail=template(TOOLS_BLOCK_TAIL),
    updated_tools_head="",
    json_object_block=(
        "\n\nYou are a helpful assistant designed to output JSON.\n"
        "## Response Format:\n\nReply with JSON object ONLY."
    ),
    json_schema_head=(
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    ),
    calls_tag="tool_calls",
    invoke_tag="invoke",
    parameter_tag="parameter",
    empty_arguments_line="",
    system_in_place=False,
    drops_empty_parts=True,
    has_pictures=False,
    fills_missing_reasoning=False,
    namespace_separator="__",
    describes_namespaces=False,
    sorts_calls_by_id=True,
)
