"""When a sequence ends: end-of-text, stop ids, max_tokens, the model's length."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deepinfer_engine.core.types import FinishReason, SamplingParams


def cut_at_stop(
    emitted: Sequence[int],
    *,
    output_len: int,
    total_len: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    max_model_len: int,
) -> tuple[int, FinishReason | None]:
    """How many of one step's tokens are kept, and why the sequence ends there, if it does.

    output_len, total_len: committed output and prompt+output tokens before this step.
    A stop token is kept and is the last one. A stop wins over a length reached by the same token.
    Before `min_tokens` neither end-of-text nor stop ids end the sequence.
    """
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(eos_token_ids)
    for kept, token in enumerate(emitted, start=1):
        if token in stops and output_len + kept > sampling.min_tokens:
            return kept, "stop"
        if output_len + kept >= sampling.max_tokens or total_len + kept >= max_model_len:
            return kept, "length"
    return len(emitted), None


def draft_room(nextn: int, total: int, most: int) -> int:
    """Drafts a step may verify behind `total` tokens, so that they and one sampled token are at
    most `most`."""
    return max(0, min(nextn, most - total - 1))
