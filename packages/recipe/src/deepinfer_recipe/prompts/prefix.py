"""Does the next prompt begin with all that the last turn left in the cache?

In a loop of calls and results the prompt of turn n with the model's output should be, byte for
byte, the beginning of the prompt of turn n + 1: then nothing is computed twice. The formats
make that so when tools are declared and clients send back what they got. Where it is not so,
`first_divergence` tells the place and the usual cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_recipe.conversation.special_tokens import (
    DEFAULT_SPECIAL_TOKENS,
    SpecialToken,
    SpecialTokens,
)
from deepinfer_recipe.prompts.render import RenderedPrompt

_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt stops continuing the turn before it.

    offset: code points that both share.
    cached, sent: what follows there in the cached text and in the new prompt, shortened.
    reason: the usual cause of a divergence in such a place.
    """

    offset: int
    cached: str
    sent: str
    reason: str


def _shared_chars(left: str, right: str) -> int:
    """Length of the longest common beginning, by halving."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def first_divergence(
    earlier: RenderedPrompt,
    output: str,
    later: RenderedPrompt,
    special_tokens: SpecialTokens = DEFAULT_SPECIAL_TOKENS,
) -> Divergence | None:
    """Compare `earlier.prompt` + `output` + end of sentence with the beginning of `later`.

    `output` is the model's text with or without its end-of-sentence token. None means that
    the later prompt continues the earlier turn exactly.
    """
    end = special_tokens.token(SpecialToken.Eos)
    cached = earlier.prompt + output.removesuffix(end) + end
    offset = _shared_chars(cached, later.prompt)
    if offset == len(cached):
        return None
    reason = _reason(cached, later.prompt, offset, len(earlier.prompt), special_tokens)
    return Divergence(
        offset,
        cached[offset : offset + _SHOWN_CHARS],
        later.prompt[offset : offset + _SHOWN_CHARS],
        reason,
    )


def _reason(cached: str, sent: str, offset: int, output_start: int, tokens: SpecialTokens) -> str:
    thinks, thought = (
        tokens.token(token) for token in (SpecialToken.ThinkingStart, SpecialToken.ThinkingEnd)
    )
    assistant = tokens.token(SpecialToken.Assistant)
    turn = cached.rfind(assistant, 0, offset)
    opening = turn + len(assistant)
    if turn >= 0 and cached.startswith(thinks, opening) and sent.startswith(thought, opening):
        return "without tools the thinking of earlier turns is not shown again"
    if offset < output_start:
        return "something before the answer changed: system text, tools, effort or an older turn"
    if cached[offset].isspace() or (cached[offset - 1].isspace() and offset > output_start):
        return "newlines around thinking and calls are not part of what clients get"
    dsml = tokens.token(SpecialToken.Dsml)
    if dsml in cached[output_start : offset + len(dsml)]:
        return "call arguments are printed anew from the JSON that the client sends back"
    return "the client sent back other text than the model wrote"
