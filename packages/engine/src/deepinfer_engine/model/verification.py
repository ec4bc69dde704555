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
from deepinfer_engine.model.sampling import sampling_batch

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
        return [_output(result, i, c.sampling.logprobs, drafted=0) for i, c in enumerate(chunks)]

    def arrays(self, rows: Sequence[DecodeRow]) -> SamplingBatch:
        """The sampling parameters of a decode step."""
        return sampling_batch(
            [r.sampling for r in rows],
            [r.history for r in rows],
            [r.prompt_len for r in rows],
            self._eos,
            coupled=self._coupled,
        )

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
        return [
            _output(result, i, r.sampling.logprobs, drafted=int(lens[i]))
            for i, r in enumerate(rows)
        ]


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


def _output(result: VerifyResult, i: int, logprobs: int | None, *, drafted: int) -> StepOutput:
    low, high = int(result.cu_tokens[i]), int(result.cu_tokens[i + 1])
    tokens = tuple(result.tokens[low:high].tolist())
    details: tuple[TokenLogprob, ...] = ()
    if logprobs is not None and result.logprobs is not None:
        details = tuple(
            TokenLogprob(
                int(result.tokens[at]), float(result.logprobs[at]), _top(result, at, logprobs)
            )
            for at in range(low, high)
        )
    return StepOutput(
        tokens=tokens,
        n_drafted=drafted,
        n_accepted=max(len(tokens) - 1, 0),
        logprobs=details,
        failed=bool(result.dead[i]),
    )


def _top(result: VerifyResult, at: int, count: int) -> tuple[tuple[int, float], ...]:
    if not count or result.top_ids is None or result.top_logprobs is None:
        return ()
    pairs = zip(
        result.top_ids[at, :count].tolist(), result.top_logprobs[at, :count].tolist(), strict=True
    )
    return tuple((int(token), float(logprob)) for token, logprob in pairs)
