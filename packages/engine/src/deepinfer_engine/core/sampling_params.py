"""Ranges of sampling parameters: checked once, at the edge, with the field's name in the
message."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import RequestError

MAX_LOGPROBS = 20
MAX_STOP_IDS = 256
MAX_BIASED_IDS = 1024
MAX_PRIORITY = 1 << 20
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: one near zero makes them infinite."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds where a request does not say; a model's files may give others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError naming the first parameter that is out of range for a vocabulary of this
    size."""
    _within("temperature", params.temperature, 0.0, 100.0)
    _within("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _within("min_p", params.min_p, 0.0, 1.0)
    _within("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", params.repetition_penalty, MIN_REPETITION_PENALTY, 10.0)
    if not -1 <= params.top_k < 2**63:
        raise RequestError(
            f"top_k must be -1 or 0 (off) or positive and below 2^63, got {params.top_k}"
        )
    if params.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {params.max_tokens}")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise RequestError(
            f"min_tokens must be in 0..max_tokens ({params.max_tokens}), got {params.min_tokens}"
        )
    if params.constraint is not None and (params.ignore_eos or params.min_tokens):
        name = "ignore_eos" if params.ignore_eos else "min_tokens"
        raise RequestError(
            f"{name} cannot be combined with a constraint: where the constraint ends the output, "
            "nothing may follow"
        )
    if not -MAX_PRIORITY <= params.priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority must be in -{MAX_PRIORITY}..{MAX_PRIORITY}, got {params.priority}"
        )
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs must be in 0..{MAX_LOGPROBS}, got {params.logprobs}")
    if params.seed is not None and not 0 <= params.seed < 2**63:
        raise RequestError(f"seed must be in 0..2^63-1, got {params.seed}")
    if len(params.stop_token_ids) > MAX_STOP_IDS:
        raise RequestError(
            f"at most {MAX_STOP_IDS} stop_token_ids, got {len(params.stop_token_ids)}"
        )
    if len(params.logit_bias) > MAX_BIASED_IDS:
        raise RequestError(
            f"at most {MAX_BIASED_IDS} logit_bias entries, got {len(params.logit_bias)}"
        )
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(token for token, _ in params.logit_bias)),
    ):
        wrong = next((t for t in ids if not 0 <= t < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"{name} holds token {wrong}; this model's ids are 0..{vocab_size - 1}"
            )
    for token, bias in params.logit_bias:
        _within(f"logit_bias[{token}]", bias, -100.0, 100.0)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        raise RequestError(
            f"{name} must be in {'(' if open_low else '['}{low:g}, {high:g}], got {value}"
        )
