"""SamplingParams of a step's requests as the arrays of a `SamplingBatch`.

Features that no request of the step uses cost nothing: their array is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from deepinfer_engine.adapters.dspark import Penalties, RaggedIds, SamplingBatch
from deepinfer_engine.core.runner import DecodeRow
from deepinfer_engine.core.token_log import TokenLog
from deepinfer_engine.core.types import SamplingParams

_COLD = 1e-5
"""A lower temperature is 0: logits divided by it pass the range of a number, and what is drawn is
the likeliest token long before."""


def sampling_batch(
    params: Sequence[SamplingParams],
    histories: Sequence[Sequence[int]],
    prompt_lens: Sequence[int],
    eos_token_ids: tuple[int, ...],
    positions: Sequence[int] | None = None,
    *,
    coupled: bool = False,
) -> SamplingBatch:
    """One entry a request.

    coupled: of those that do not say: what is sampled depends on the seed and on nothing that a
    drafter does.

    histories: committed tokens, prompt first; may be empty where no penalty is set and `positions`
    is given.
    positions: of the next token; default len(history).
    """
    lengths = np.array(
        [len(h) for h in histories] if positions is None else positions, dtype=np.int64
    )
    produced = [at - n for at, n in zip(lengths.tolist(), prompt_lens, strict=True)]
    return SamplingBatch(
        temperature=np.array(
            [p.temperature if p.temperature >= _COLD else 0.0 for p in params], dtype=np.float64
        ),
        seeds=np.array([p.seed or 0 for p in params], dtype=np.uint64),
        positions=lengths,
        coupled=_coupled(params, coupled),
        top_p=_unless_all([p.top_p for p in params], 1.0),
        top_k=np.array([p.top_k for p in params], dtype=np.int64)
        if any(p.top_k > 0 for p in params)
        else None,
        min_p=_unless_all([p.min_p for p in params], 0.0),
        penalties=_penalties(params, histories, prompt_lens),
        logit_bias=_bias(params),
        stop_ids=RaggedIds.of([p.stop_token_ids for p in params])
        if any(p.stop_token_ids for p in params)
        else None,
        eos_ids=eos_token_ids,
        ignore_eos=np.array([p.ignore_eos for p in params])
        if any(p.ignore_eos for p in params)
        else None,
        min_position=(
            np.array(
                [n + p.min_tokens for n, p in zip(prompt_lens, params, strict=True)], dtype=np.int64
            )
            if any(p.min_tokens for p in params)
            else None
        ),
        max_new=np.array(
            [max(p.max_tokens - d, 1) for p, d in zip(params, produced, strict=True)],
            dtype=np.int64,
        ),
    )


class StepSampling:
    """The arrays of decode steps: of the same requests as the step before, only where they are."""

    def __init__(self, eos_token_ids: tuple[int, ...], *, coupled: bool) -> None:
        self._eos = eos_token_ids
        self._coupled = coupled
        self._params: list[SamplingParams] = []
        self._prompt_lens: list[int] = []
        self._most = np.zeros(0, dtype=np.int64)
        """Tokens at which each request ends."""
        self._last: SamplingBatch | None = None

    def of(self, rows: Sequence[DecodeRow]) -> SamplingBatch:
        params = [r.sampling for r in rows]
        prompt_lens = [r.prompt_len for r in rows]
        last = self._last
        if (
            last is not None
            and last.penalties is None  # those follow the text
            and params == self._params
            and prompt_lens == self._prompt_lens
        ):
            positions = np.array([len(r.history) for r in rows], dtype=np.int64)
            return last.moved(positions, np.maximum(self._most - positions, 1))
        histories = [r.history for r in rows]
        self._last = sampling_batch(
            params, histories, prompt_lens, self._eos, coupled=self._coupled
        )
        self._params, self._prompt_lens = params, prompt_lens
        self._most = np.array(
            [n + p.max_tokens for n, p in zip(prompt_lens, params, strict=True)], dtype=np.int64
        )
        return self._last


def _coupled(
    params: Sequence[SamplingParams], default: bool
) -> np.ndarray[tuple[int], np.dtype[np.bool_]] | None:
    chosen = [default if p.coupled is None else p.coupled for p in params]
    return np.array(chosen, dtype=np.bool_) if any(chosen) else None


def _unless_all(
    values: list[float], off: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    return None if all(v == off for v in values) else np.array(values, dtype=np.float64)


def _bias(params: Sequence[SamplingParams]) -> RaggedIds | None:
    if not any(p.logit_bias for p in params):
        return None
    return RaggedIds.of(
        [[token for token, _ in p.logit_bias] for p in params],
        [[bias for _, bias in p.logit_bias] for p in params],
    )


def _penalties(
    params: Sequence[SamplingParams], histories: Sequence[Sequence[int]], prompt_lens: Sequence[int]
) -> Penalties | None:
    def wanted(p: SamplingParams) -> bool:
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1

    if not any(wanted(p) for p in params):
        return None
    counts: list[Counter[int]] = []
    prompts: list[list[int]] = []
    for p, history, n in zip(params, histories, prompt_lens, strict=True):
        log = history if isinstance(history, TokenLog) else TokenLog(tuple(history))
        counts.append(log.counts(n) if wanted(p) else Counter())
        prompts.append(log.before(n) if p.repetition_penalty != 1 else [])
    return Penalties(
        output=RaggedIds.of(
            [list(c) for c in counts], [[float(n) for n in c.values()] for c in counts]
        ),
        presence=np.array([p.presence_penalty for p in params], dtype=np.float64),
        frequency=np.array([p.frequency_penalty for p in params], dtype=np.float64),
        repetition=np.array([p.repetition_penalty for p in params], dtype=np.float64),
        prompt=RaggedIds.of(prompts),
    )
