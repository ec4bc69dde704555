"""Drafters put together: another causal model as drafter, and n-grams before a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from deepinfer_dspark.backend import backend_of
from deepinfer_dspark.calibration import ProxyConfidence
from deepinfer_dspark.drafting import (
    DraftBatch,
    Drafter,
    peak_probability,
    sample_drafts,
    truncate_q,
)
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal, SparseQ
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult


class CausalModel(Protocol):
    """A small language model that can take tokens back."""

    def logits(self, request_ids: Sequence[Hashable], texts: Sequence[Sequence[int]]) -> Any:
        """[R, V] for the token after each text; the model may keep caches by request id and
        must drop what no longer agrees with the text."""
        ...

    def forget(self, request_id: Hashable) -> None:
        """Drop the cache of a request."""
        ...


class DraftModelDrafter:
    """Autoregressive drafts of any causal model that shares the target's tokenizer.

    sparse: keep only the m most likely tokens and sample from exactly that law.
    Confidences are `ProxyConfidence`: the model's own top probability, corrected by position.
    """

    def __init__(
        self,
        model: CausalModel,
        max_tokens: int = 4,
        *,
        sparse: int | None = None,
    ) -> None:
        if max_tokens < 1 or (sparse is not None and sparse < 1):
            raise ShapeError(
                f"DraftModelDrafter wants max_tokens >= 1 and sparse >= 1, got {max_tokens} and "
                f"{sparse}"
            )
        self._model, self.max_tokens, self._sparse = model, max_tokens, sparse
        self._proxy = ProxyConfidence(max_tokens)

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`."""
        R, gamma = batch.requests, self.max_tokens
        texts = [list(h) for h in batch.history]
        tokens = np.zeros((R, gamma), dtype=np.int64)
        peak = np.zeros((R, gamma))
        laws: list[Any] = []
        greedy = bool((batch.sampling.temperature == 0).all())
        for k in range(gamma):
            logits = self._model.logits(batch.request_ids, texts)
            if self._sparse is not None:
                logits = _only_top(logits, self._sparse)
            peak[:, k] = peak_probability(logits)
            tokens[:, k], law = sample_drafts(logits, batch.sampling, batch.rounds, k, rng)
            laws.append(law)
            for text, token in zip(texts, tokens[:, k].tolist(), strict=True):
                text.append(token)
        conf = self._proxy.of(batch.request_ids, peak)
        lengths = np.full(R, gamma, dtype=np.int64)
        if greedy:
            return Proposal(tokens, lengths, conf=conf)
        return Proposal(tokens, lengths, q=self._stack(laws), conf=conf)

    def _stack(self, laws: list[Any]) -> Any:
        if self._sparse is not None:
            parts = [truncate_q(law, self._sparse) for law in laws]
            return SparseQ(np.stack([p[0] for p in parts], 1), np.stack([p[1] for p in parts], 1))
        if isinstance(laws[0], np.ndarray):
            return np.stack(laws, axis=1)
        import torch

        return torch.stack(laws, dim=1)

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Correct the confidences by what was accepted."""
        self._proxy.observe(request_ids, result)

    def reset(self, request_id: Hashable) -> None:
        """Drop the model's cache of a request."""
        self._model.forget(request_id)
        self._proxy.reset(request_id)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Nothing to copy: the model rebuilds its cache from the text."""


def _only_top(logits: Any, m: int) -> Any:
    """Logits with all but the m largest of each row at -inf, so that q is exactly sparse."""
    n, vocab = int(logits.shape[0]), int(logits.shape[1])
    return backend_of(logits).truncate(
        logits, np.ones(n), np.full(n, min(m, vocab), dtype=np.int64), np.zeros(n)
    )


class MixedDrafter:
    """N-gram drafts where they have been accepted more than the model's, else the model's.

    The choice between the two looks only at acceptance in *earlier* rounds and at whether a match
    exists: looking at the model's current confidences would let a draft decide on itself.
    """

    def __init__(self, first: Drafter, model: Drafter, *, ewma: float = 0.1) -> None:
        if first.max_tokens != model.max_tokens:
            raise ShapeError(
                f"MixedDrafter wants drafters of one max_tokens, got {first.max_tokens} and "
                f"{model.max_tokens}"
            )
        self._first, self._model, self._ewma = first, model, ewma
        self.max_tokens = first.max_tokens
        # optimistic start: both are tried before one is trusted
        self._gain: dict[Hashable, np.ndarray[Any, Any]] = {}
        self._used: dict[Hashable, int] = {}

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`."""
        a, b = self._first.propose(batch, rng), self._model.propose(batch, rng)
        gains = np.array(
            [self._gain.setdefault(r, np.array([1.0, 0.9])) for r in batch.request_ids]
        ).reshape(-1, 2)
        use_first = (a.lengths > 0) & (gains[:, 0] >= gains[:, 1])
        use_first &= a.deterministic
        for request, own in zip(batch.request_ids, use_first.tolist(), strict=True):
            self._used[request] = 0 if own else 1
        tokens = np.where(use_first[:, None], a.tokens, b.tokens)
        lengths = np.where(use_first, a.lengths, b.lengths)
        conf = None
        if a.conf is not None and b.conf is not None:
            conf = np.where(use_first[:, None], a.conf, b.conf)
        if b.q is None:
            return Proposal(tokens, lengths, conf=conf)
        return Proposal(tokens, lengths, q=_with_point_masses(b.q, tokens, use_first), conf=conf)

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Credit the drafter whose drafts were judged."""
        for i, request in enumerate(request_ids):
            which, gain = self._used.get(request), self._gain.get(request)
            if which is None or gain is None or result.judged[i] == 0:
                continue
            share = float(result.n_accepted[i]) / max(float(result.verified[i]), 1.0)
            gain[which] += self._ewma * (share - gain[which])
        for which, drafter in enumerate((self._first, self._model)):
            own = np.array(
                [i for i, r in enumerate(request_ids) if self._used.get(r) == which], dtype=np.int64
            )
            if own.size:
                drafter.observe([request_ids[i] for i in own.tolist()], result.select(own))

    def reset(self, request_id: Hashable) -> None:
        """Drop the state of both."""
        self._gain.pop(request_id, None)
        self._used.pop(request_id, None)
        self._first.reset(request_id)
        self._model.reset(request_id)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Copy the state of both."""
        if request_id in self._gain:
            self._gain[new_id] = self._gain[request_id].copy()
        self._first.fork(request_id, new_id)
        self._model.fork(request_id, new_id)


def _with_point_masses(q: Any, tokens: Any, rows: Any) -> Any:
    """q with the rows of the given requests replaced by point masses on their tokens."""
    at = np.flatnonzero(rows)
    if at.size == 0:
        return q
    gamma = np.arange(tokens.shape[1])[None, :]
    if isinstance(q, SparseQ):
        ids, probs = np.array(q.ids), np.array(q.probs)
        probs[at] = 0.0
        ids[at, :, 0], probs[at, :, 0] = tokens[at], 1.0
        return SparseQ(ids, probs)
    out = q.clone() if hasattr(q, "clone") else q.copy()
    out[at] = 0.0
    out[at[:, None], gamma, tokens[at]] = 1.0
    return out
