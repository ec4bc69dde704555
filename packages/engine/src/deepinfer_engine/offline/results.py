"""What offline generation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deepinfer_engine.core.types import FinishReason, TokenLogprob, Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became. `text` leaves special tokens out; `token_ids` holds them."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens behind the first, where asked for."""
    stopped_by: str | None = None
    """The text of `stop` that ended it."""
    message: dict[str, Any] | None = None
    """Of `LLM.chat`: the answer as Chat Completions has it, with reasoning and tool calls."""
    others: tuple[Completion, ...] = ()
    """The further answers to the same prompt, where `n` is above 1."""


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer while it is made.

    index: of the prompt; answer: which of its `n`. `completion` is set on the last piece.
    """

    index: int
    answer: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    completion: Completion | None = field(default=None)
