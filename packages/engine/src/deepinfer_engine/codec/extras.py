"""Sampling fields that public clients send beyond their protocol, and that this engine honours."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.core.sampling_params import MAX_PRIORITY, MIN_REPETITION_PENALTY
from deepinfer_engine.core.types import SamplingParams


def _null_is_default(default: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: default if value is None else value)


class Extras(BaseModel):
    """Ranges as in `SamplingParams`; null counts as absent; all else in a body is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    top_k: Annotated[int, Field(ge=-1), _null_is_default(-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1), _null_is_default(0.0)] = 0.0
    repetition_penalty: Annotated[
        float, Field(ge=MIN_REPETITION_PENALTY, le=10), _null_is_default(1.0)
    ] = 1.0
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), _null_is_default(0)] = 0
    coupled: bool | None = None
    min_tokens: Annotated[int, Field(ge=0), _null_is_default(0)] = 0
    ignore_eos: Annotated[bool, _null_is_default(False)] = False
    stop_token_ids: Annotated[list[int], Field(max_length=64), _null_is_default([])] = []
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=1024),
        _null_is_default({}),
    ] = {}


_MARKS = tuple(f'"{name}"'.encode() for name in Extras.model_fields)


def apply_extras(sampling: SamplingParams, body: bytes, vocab_size: int) -> SamplingParams:
    """`sampling` with the extras of a body that is known to be a JSON object.

    Raises InvalidRequest naming the field. Most bodies hold none of the names and are not parsed
    again.
    """
    if not any(mark in body for mark in _MARKS):
        return sampling
    try:
        extras = Extras.model_validate(json.loads(body))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(
            f"{param}: {first['msg']}, got {first.get('input')!r}", param=param
        ) from exc
    given = extras.model_fields_set
    return replace(
        sampling,
        # Messages has a top_k of its own; 0 is how some clients spell "off". Any int may come, and
        # the engine counts in 64 bits.
        top_k=min(extras.top_k or -1, vocab_size) if "top_k" in given else sampling.top_k,
        min_p=extras.min_p,
        repetition_penalty=(
            extras.repetition_penalty
            if "repetition_penalty" in given
            else sampling.repetition_penalty
        ),
        min_tokens=min(extras.min_tokens, sampling.max_tokens),
        ignore_eos=extras.ignore_eos,
        priority=extras.priority,
        coupled=extras.coupled,
        stop_token_ids=tuple(
            _token(i, "stop_token_ids", vocab_size) for i in extras.stop_token_ids
        ),
        logit_bias=tuple(
            (_token(key, "logit_bias", vocab_size), bias) for key, bias in extras.logit_bias.items()
        ),
    )


def _token(value: int | str, param: str, vocab_size: int) -> int:
    text = str(value)
    # Python refuses to read an int of thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) >= vocab_size:
        raise InvalidRequest(
            f"{param}: wanted token ids below {vocab_size}, got {text[:40]!r}", param=param
        )
    return int(text)
