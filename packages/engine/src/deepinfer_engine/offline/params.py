"""Sampling parameters of offline use: the engine's, and what is done around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from deepinfer_engine.core import types
from deepinfer_engine.core.sampling_params import MAX_LOGPROBS, validate
from deepinfer_engine.core.types import Constraint
from deepinfer_engine.errors import RequestError

MAX_ANSWERS = 128


@dataclass(frozen=True, slots=True)
class SamplingParams(types.SamplingParams):
    """How to continue a prompt. Temperature 0 is argmax, lowest id on ties.

    n: answers to each prompt; the prompt is computed once.
    stop: texts that end an answer and are no part of it.
    prompt_logprobs: k >= 0: log-probabilities of the prompt's tokens and of the k likeliest.
    bad_words: texts that must not be produced.
    allowed_token_ids: no other token is produced; end-of-text only if it is among them.
    skip_special_tokens: leave special tokens out of `text`.
    truncate_prompt_tokens: keep only so many last tokens of a prompt.
    """

    n: int = 1
    stop: str | Sequence[str] = ()
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def engine(self, seed: int) -> types.SamplingParams:
        """The engine's part."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(types.SamplingParams)}
        own["seed"] = seed
        return types.SamplingParams(**own)


_INTEGERS = ("top_k", "max_tokens", "min_tokens", "n")
_OPTIONAL_INTEGERS = ("seed", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
_NUMBERS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_FLAGS = ("ignore_eos", "skip_special_tokens")


def checked(params: Any, vocab_size: int) -> SamplingParams:
    """Raise RequestError naming the first parameter of a wrong type or out of range."""
    if isinstance(params, types.SamplingParams) and not isinstance(params, SamplingParams):
        own: dict[str, Any] = {f.name: getattr(params, f.name) for f in fields(params)}
        params = SamplingParams(**own)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params: wanted SamplingParams, got {type(params).__name__}")
    _check_types(params)
    if isinstance(params.stop_token_ids, list):
        params = replace(params, stop_token_ids=tuple(params.stop_token_ids))
    validate(params, vocab_size)
    if not 1 <= params.n <= MAX_ANSWERS:
        raise RequestError(f"n must be in 1..{MAX_ANSWERS}, got {params.n}", param="n")
    if params.prompt_logprobs is not None and not 0 <= params.prompt_logprobs <= MAX_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs must be in 0..{MAX_LOGPROBS}, got {params.prompt_logprobs}",
            param="prompt_logprobs",
        )
    if params.truncate_prompt_tokens is not None and params.truncate_prompt_tokens < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, got {params.truncate_prompt_tokens}",
            param="truncate_prompt_tokens",
        )
    if any(not s for s in params.stops):
        raise RequestError("stop holds an empty text, which would end every answer", param="stop")
    if any(not w for w in params.bad_words):
        raise RequestError("bad_words holds an empty text", param="bad_words")
    _check_allowed(params, vocab_size)
    return params


def _check_types(params: SamplingParams) -> None:
    def wrong(name: str, wanted: str) -> RequestError:
        value = getattr(params, name)
        return RequestError(f"{name} must be {wanted}, got {value!r}", param=name)

    def is_int(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    for name in _INTEGERS:
        if not is_int(getattr(params, name)):
            raise wrong(name, "an integer")
    for name in _OPTIONAL_INTEGERS:
        if getattr(params, name) is not None and not is_int(getattr(params, name)):
            raise wrong(name, "an integer or None")
    for name in _NUMBERS:
        value = getattr(params, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong(name, "a number")
    for name in _FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise wrong(name, "True or False")
    _check_lists(params, wrong, is_int)


def _check_lists(params: SamplingParams, wrong: Any, is_int: Any) -> None:
    def is_list(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)

    stop: Any = params.stop
    words: Any = params.bad_words
    if not isinstance(stop, str) and not (is_list(stop) and all(isinstance(s, str) for s in stop)):
        raise wrong("stop", "a text or a list of texts")
    if not is_list(words) or not all(isinstance(w, str) for w in words):
        raise wrong("bad_words", "a list of texts")
    allowed = params.allowed_token_ids
    if allowed is not None and not (is_list(allowed) and all(is_int(t) for t in allowed)):
        raise wrong("allowed_token_ids", "a list of token ids")
    if not is_list(params.stop_token_ids) or not all(is_int(t) for t in params.stop_token_ids):
        raise wrong("stop_token_ids", "a list of token ids")
    pairs: Any = params.logit_bias
    if not is_list(pairs) or not all(
        is_list(p) and len(p) == 2 and is_int(p[0]) and isinstance(p[1], int | float) for p in pairs
    ):
        raise wrong("logit_bias", "pairs (token id, bias)")
    constraint: Any = params.constraint
    if constraint is not None and not isinstance(constraint, Constraint):
        raise wrong("constraint", "one of json_schema, json_object, regex, choice and ebnf")


def _check_allowed(params: SamplingParams, vocab_size: int) -> None:
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    if not allowed:
        raise RequestError("allowed_token_ids must hold a token", param="allowed_token_ids")
    wrong = next((t for t in allowed if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"allowed_token_ids holds token {wrong}; this model's ids are 0..{vocab_size - 1}",
            param="allowed_token_ids",
        )
