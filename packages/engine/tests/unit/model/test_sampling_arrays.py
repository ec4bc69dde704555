"""The sampling arrays of a step are kept from the one before where the requests are the same."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from deepinfer_engine.core.runner import DecodeRow
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.verification import Sampler

EOS = (1,)


def row(history: list[int], prompt_len: int, sampling: SamplingParams) -> DecodeRow:
    return DecodeRow(history, prompt_len, [1], 0, sampling, 0)


def told(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if value is not None and hasattr(value, "__dataclass_fields__"):
        return [told(getattr(value, field.name)) for field in fields(value)]
    return value


def test_they_are_those_of_a_sampler_that_saw_nothing_before() -> None:
    kinds = [
        SamplingParams(temperature=0.0, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, top_p=0.9, top_k=5, min_p=0.1, min_tokens=4),
        SamplingParams(seed=5, stop_token_ids=(7, 8), logit_bias=((3, 1.5),), coupled=False),
        SamplingParams(seed=6, presence_penalty=0.5, repetition_penalty=1.2),
    ]
    plain = [row([5] * (4 + i), 3, kind) for i, kind in enumerate(kinds[:3])]
    late = row([5, 6, 7, 8], 2, kinds[0])
    steps = [plain, plain, plain[::-1], plain[::-1], [*plain, late], [late], [late], plain[1:]]
    penalised = [row([5, 6, 5], 1, kinds[3]), *plain]
    kept = Sampler(EOS, coupled=True)
    for n, rows in enumerate([*steps, penalised, penalised, plain]):
        fresh = Sampler(EOS, coupled=True).arrays(rows)
        assert told(kept.arrays(rows)) == told(fresh), n
        for one in rows:
            one.history.append(9 + n)  # type: ignore[attr-defined]
