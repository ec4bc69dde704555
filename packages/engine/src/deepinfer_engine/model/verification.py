"""From logits to tokens, for every family: sampling, verification of drafts, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_engine.adapters.dspark import (
    CounterRng,
    Proposal,
    SamplingBatch,
    Verifier,
    VerifyResult,
)
from deepinfer_engine.core.masks import mask_rows
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.types import TokenLogprob
from deepinfer_engine.model.sampling import StepSampling, sampling_batch

IntArray = npt.NDArray[np.int64]


class Sampler:
    """Samples first tokens and verifies drafts. One random stream: keyed, so order is free.

    coupled: draw by noise that a drafter shares, keyed by seed and position. Drafts then change how
        soon a token comes and never which: how many are made may follow anything, other requests
        and the memory that is left included. Worth its cost where there is a drafter.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], *, coupled: bool = False) -> None:
        self.rng = CounterRng()
        self._eos = eos_token_ids
        self._coupled = coupled
        self._verifier = Verifier()
        self._arrays = StepSampling(eos_token_ids, coupled=coupled)

    def first_tokens(self, chunks: Sequence[PrefillChunk], logits: Tensor) -> list[StepOutput]:
        """The first output token of prompts, from one row of logits each."""
        ends = [c.start + len(c.token_ids) for c in chunks]
        prompt_lens = [end - c.resumed for end, c in zip(ends, chunks, strict=True)]
        sampling = sampling_batch(
            [c.sampling for c in chunks],
            [c.prompt for c in chunks],
            prompt_lens,
            self._eos,
            ends,
            coupled=self._coupled,
        )
        result = self._verifier.verify(
            logits,
            np.arange(len(chunks) + 1),
            Proposal.empty(len(chunks)),
            np.zeros(len(chunks), dtype=np.int64),
            sampling,
            masks=mask_rows([c.constraint for c in chunks]),
            rng=self.rng,
            logprobs=_most_logprobs(chunks),
        )
        return _outputs(result, [c.sampling.logprobs for c in chunks], [0] * len(chunks))

    def arrays(self, rows: Sequence[DecodeRow]) -> SamplingBatch:
        """The sampling parameters of a decode step."""
        return self._arrays.of(rows)

    def verify(
        self,
        rows: Sequence[DecodeRow],
        logits: Tensor,
        proposal: Proposal,
        lens: IntArray,
        sampling: SamplingBatch,
    ) -> list[StepOutput]:
        """What a step emits: accepted drafts, then one token.

        logits: [sum(1 + lens), vocab], of each row's anchor and then of its drafts.
        """
        result = self._verifier.verify(
            logits,
            np.concatenate([[0], np.cumsum(lens + 1)]),
            proposal,
            lens,
            sampling,
            masks=mask_rows([r.constraint for r in rows], proposal.tokens, lens),
            rng=self.rng,
            logprobs=_most_logprobs(rows),
        )
        return _outputs(result, [r.sampling.logprobs for r in rows], lens.tolist())


def prompt_logprobs(logits: Tensor, following: Sequence[int], k: int) -> tuple[TokenLogprob, ...]:
    """What rows [n, vocab] said of the token behind each; rows with -1 behind them are left out."""
    rows = [i for i, token in enumerate(following) if token >= 0]
    said = torch.log_softmax(logits[rows].to(torch.float64), dim=-1)
    top = torch.topk(said, k, dim=-1) if k else None
    out: list[TokenLogprob] = []
    for at, row in enumerate(rows):
        best: tuple[tuple[int, float], ...] = ()
        if top is not None:
            pairs = zip(top.indices[at].tolist(), top.values[at].tolist(), strict=True)
            best = tuple((int(token), float(value)) for token, value in pairs)
        out.append(TokenLogprob(following[row], float(said[at, following[row]]), best))
    return tuple(out)


def _most_logprobs(items: Sequence[DecodeRow] | Sequence[PrefillChunk]) -> int | None:
    asked = [i.sampling.logprobs for i in items if i.sampling.logprobs is not None]
    return max(asked) if asked else None


def _outputs(
    result: VerifyResult, logprobs: Sequence[int | None], drafted: Sequence[int]
) -> list[StepOutput]:
    """logprobs, drafted: of each request."""
    tokens, dead = result.tokens.tolist(), result.dead.tolist()
    ends = result.cu_tokens.tolist()
    outputs: list[StepOutput] = []
    for i, (asked, drafts) in enumerate(zip(logprobs, drafted, strict=True)):
        low, high = ends[i], ends[i + 1]
        output = StepOutput(tuple(tokens[low:high]), drafts, max(high - low - 1, 0), (), dead[i])
        if asked is not None:
            output.logprobs = _said(result, low, high, asked)
        outputs.append(output)
    return outputs


def _said(result: VerifyResult, low: int, high: int, count: int) -> tuple[TokenLogprob, ...]:
    if result.logprobs is None:
        return ()
    return tuple(
        TokenLogprob(int(result.tokens[at]), float(result.logprobs[at]), _top(result, at, count))
        for at in range(low, high)
    )


def _top(result: VerifyResult, at: int, count: int) -> tuple[tuple[int, float], ...]:
    if not count or result.top_ids is None or result.top_logprobs is None:
        return ()
    pairs = zip(
        result.top_ids[at, :count].tolist(), result.top_logprobs[at, :count].tolist(), strict=True
    )
    return tuple((int(token), float(logprob)) for token, logprob in pairs)
