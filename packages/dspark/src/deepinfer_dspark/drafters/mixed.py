"""Drafters put together: another causal model as drafter, and n-grams before a model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from deepinfer_dspark.arrays import Int
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

    @property
    def max_length(self) -> int | None:
        """The longest text it takes, or None."""
        ...

    def logits(self, request_ids: Sequence[Hashable], texts: Sequence[Sequence[int]]) -> Any:
        """[R, V] for the token after each text; the model may keep caches by request id and
        must drop what no longer agrees with the text."""
        ...

    def forget(self, request_id: Hashable) -> None:
        """Drop the cache of a request."""
        ...


class DraftModelDrafter:
    """Autoregressive drafts of any causal model that shares the target's tokenizer.

    sparse: keep only the m most likely tokens and sample from exactly that distribution.
    vocab_size: tokens the target knows; a model whose vocabulary is padded further drafts none of
        the padding. Left out, such a draft is made, and rejected.
    Confidences are `ProxyConfidence`: the model's own top probability, corrected by position.

    Raises ShapeError for arguments that do not fit.
    """

    def __init__(
        self,
        model: CausalModel,
        max_tokens: int = 4,
        *,
        sparse: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if min(max_tokens, sparse or 1, vocab_size or 1) < 1 or sparse == 0 or vocab_size == 0:
            raise ShapeError(
                f"DraftModelDrafter wants max_tokens, sparse and vocab_size >= 1, got "
                f"{max_tokens}, {sparse} and {vocab_size}"
            )
        self._model, self.max_tokens, self._sparse = model, max_tokens, sparse
        self._vocab = vocab_size
        self._proxy = ProxyConfidence(max_tokens)

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`; a request whose text fills the model's context gets no more."""
        R, gamma = batch.requests, self.max_tokens
        texts = [list(h) for h in batch.history]
        tokens, lengths = np.zeros((R, gamma), dtype=np.int64), batch.room(gamma)
        if self._model.max_length is not None:
            free = self._model.max_length + 1 - np.array([len(t) for t in texts], dtype=np.int64)
            lengths = np.clip(free, 0, lengths)
        peak = np.zeros((R, gamma))
        laws: list[tuple[Int, Any]] = []
        for k in range(int(lengths.max(initial=0))):
            at = np.flatnonzero(lengths > k)
            logits = self._model.logits(
                [batch.request_ids[i] for i in at.tolist()], [texts[i] for i in at.tolist()]
            )
            if self._vocab is not None:
                logits = logits[:, : self._vocab]
            if self._sparse is not None:
                logits = _only_top(logits, self._sparse)
            peak[at, k] = peak_probability(logits)
            drawn, law = sample_drafts(logits, batch.sampling.select(at), batch.rounds[at], k, rng)
            tokens[at, k] = drawn
            laws.append((at, law))
            for i, token in zip(at.tolist(), drawn.tolist(), strict=True):
                texts[i].append(token)
        conf = self._proxy.of(batch.request_ids, peak)
        if not laws or bool((batch.sampling.temperature == 0).all()):
            return Proposal(tokens, lengths, conf=conf)
        return Proposal(tokens, lengths, q=self._stack(laws, R), conf=conf)

    def _stack(self, laws: list[tuple[Int, Any]], requests: int) -> Any:
        """[R, gamma, V] of the distributions of each step; zeros where nothing was drafted."""
        shape = (requests, self.max_tokens)
        if self._sparse is not None:
            width = min(self._sparse, int(laws[0][1].shape[1]))
            ids = np.zeros((*shape, width), dtype=np.int64)
            probs = np.zeros((*shape, width))
            for k, (at, law) in enumerate(laws):
                ids[at, k], probs[at, k] = truncate_q(law, width)
            return SparseQ(ids, probs)
        first = laws[0][1]
        wide = (*shape, int(first.shape[1]))
        q: Any = np.zeros(wide) if isinstance(first, np.ndarray) else first.new_zeros(wide)
        for k, (at, law) in enumerate(laws):
            q[at, k] = law
        return q

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
    xp = backend_of(logits)
    n, vocab = int(logits.shape[0]), int(logits.shape[1])
    top_k = np.full(n, min(m, vocab), dtype=np.int64)
    return xp.truncate(xp.widen(logits), np.ones(n), top_k, np.zeros(n))


class MixedDrafter:
    """N-gram drafts where they have been accepted more than the model's, else the model's.

    The model is asked for the other requests only.

    The choice between the two looks only at acceptance in *earlier* rounds and at whether a match
    exists: looking at the model's current confidences would let a draft decide on itself.

    Raises ShapeError for arguments that do not fit.
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
        a = self._first.propose(batch, rng)
        gains = np.array(
            [self._gain.setdefault(r, np.array([1.0, 0.9])) for r in batch.request_ids]
        ).reshape(-1, 2)
        use_first = (a.lengths > 0) & (gains[:, 0] >= gains[:, 1])
        use_first &= a.deterministic
        # the model still sees every request's features, and drafts only for those that need it
        room = np.where(use_first, 0, batch.room(self.max_tokens))
        b = self._model.propose(replace(batch, wanted=room), rng)
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
