"""What distinguishes one prompt format of the V4 family from another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from deepinfer_recipe.conversation.messages import ReasoningEffort
from deepinfer_recipe.conversation.special_tokens import SpecialToken

TemplatePiece: TypeAlias = str | SpecialToken
"""Plain text, or a special token that the renderer spells."""

_MARKED = {
    token.value: token
    for token in (SpecialToken.Dsml, SpecialToken.ThinkingStart, SpecialToken.ThinkingEnd)
}
_MARKS = re.compile("(" + "|".join(re.escape(s) for s in _MARKED) + ")")


def template(text: str) -> tuple[TemplatePiece, ...]:
    """Split a literal of the format at the special tokens it contains."""
    return tuple(_MARKED.get(piece, piece) for piece in _MARKS.split(text) if piece)


@dataclass(frozen=True)
class PromptFormat:
    """The bytes and rules of one prompt format.

    The tools block is `tools_block_head` + one JSON line a tool + `tools_block_tail`. The tag
    names stand after the DSML token: `<` DSML `tag` `>`.
    """

    name: str
    effort_texts: dict[ReasoningEffort, str]
    tools_block_head: tuple[TemplatePiece, ...]
    tools_block_tail: tuple[TemplatePiece, ...]
    updated_tools_head: str
    json_object_block: str
    json_schema_head: str
    calls_tag: str
    invoke_tag: str
    parameter_tag: str
    empty_arguments_line: str
    """What stands between the lines of an invocation without parameters."""
    system_in_place: bool
    """System messages keep their place behind their own token; else all move to the front."""
    drops_empty_parts: bool
    """Empty parts of a user turn leave no separator."""
    has_pictures: bool
    fills_missing_reasoning: bool
    """A kept but missing thinking part renders as an empty one, not as none."""
    namespace_separator: str
    """What stands between a namespace and a function's own name."""
    describes_namespaces: bool
    """A namespace's description stands before that of each of its functions."""
    sorts_calls_by_id: bool
    """The calls of a turn are shown in the order of their ids, not as they were made."""
