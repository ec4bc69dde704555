"""The drafter's side of the interface, and how a draft token is sampled from its own law."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Int, to_host
from deepinfer_dspark.backend import backend_of
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.sampling import SamplingBatch, scale_and_truncate
from deepinfer_dspark.uniforms import Uniforms, draft_key
from deepinfer_dspark.verification import VerifyResult


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What a drafter may look at for R requests.

    request_ids: R hashable ids, stable over rounds.
    anchors:     int64 [R]; the last committed token, not yet seen by the target.
    positions:   int64 [R]; position of the anchor.
    history:     R sequences of committed token ids, prompt included, ending with the anchor.
    features:    float [sum n, m*d] or None; target hidden states of the rows committed since the
                 last round, request by request, with feature_cu int64 [R+1].
    sampling:    the requests' parameters; drafts follow its temperature unless the drafter is
                 told otherwise.
    rounds:      int64 [R]; round number of each request, the key of draft noise.
    wanted:      int64 [R] or None; drafts that can be used at most (the end of the context or of
                 the answer is near, or nobody will verify them). A drafter makes no more, spends
                 no pass of a model on a request that wants none, and still takes in its features.
    """

    request_ids: Sequence[Hashable]
    anchors: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    history: Sequence[Sequence[int]]
    sampling: SamplingBatch
    rounds: npt.NDArray[np.int64]
    features: Any | None = None
    feature_cu: npt.NDArray[np.int64] | None = None
    wanted: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name in ("anchors", "positions", "rounds", "feature_cu", "wanted"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, to_host(value))
        R = len(self.request_ids)
        if len(self.history) != R or self.sampling.requests != R:
            raise ShapeError(
                f"DraftBatch of {R} requests got {len(self.history)} histories and sampling for "
                f"{self.sampling.requests}"
            )
        given = () if self.wanted is None else ("wanted",)
        for name in ("anchors", "positions", "rounds", *given):
            if getattr(self, name).shape != (R,):
                raise ShapeError(
                    f"DraftBatch wants {name} of shape ({R},), got {getattr(self, name).shape}"
                )
        if (self.features is None) != (self.feature_cu is None):
            raise ShapeError("DraftBatch wants features and feature_cu together")
        if self.features is not None and self.feature_cu is not None:
            rows = int(self.features.shape[0])
            if self.feature_cu.shape != (R + 1,) or int(self.feature_cu[-1]) != rows:
                raise ShapeError(
                    f"DraftBatch wants feature_cu [{R + 1}] ending at {rows} (rows of features), "
                    f"got shape {self.feature_cu.shape} ending at {self.feature_cu[-1:].tolist()}"
                )

    @property
    def requests(self) -> int:
        return len(self.request_ids)

    def room(self, most: int) -> Int:
        """int64 [R]; drafts to make for each request, 0..most."""
        if self.wanted is None:
            return np.full(self.requests, most, dtype=np.int64)
        return np.minimum(np.maximum(self.wanted, 0), most).astype(np.int64, copy=False)


class Drafter(Protocol):
    """Proposes up to `max_tokens` drafts a request; owns its per-request state."""

    @property
    def max_tokens(self) -> int: ...

    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """Drafts that follow each anchor."""
        ...

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """The outcome of the round that verified the last proposal."""
        ...

    def reset(self, request_id: Hashable) -> None:
        """Drop all state of a request (finished, preempted)."""
        ...

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """`new_id` continues from a copy of `request_id`'s state."""
        ...


def sample_drafts(
    logits: Any, sampling: SamplingBatch, rounds: Int, offset: int, rng: Uniforms
) -> tuple[Int, Any]:
    """One draft token a request and the exact law it was drawn from.

    logits: float [R, V] of the drafter, numpy or torch; offset: 0-based position in the block.
    Temperature and truncation are the request's own. Returns tokens int64 [R] and q float64
    [R, V] of the same kind: a one-hot row for greedy requests; for coupled requests the row is
    not used by verification.
    """
    xp = backend_of(logits)
    R = sampling.requests
    tokens, _ = xp.argmax(logits)
    q = xp.probabilities(logits)
    warm = np.asarray(sampling.temperature > 0)
    coupled = np.zeros_like(warm) if sampling.coupled is None else sampling.coupled & warm
    random, shared = np.flatnonzero(warm & ~coupled), np.flatnonzero(coupled)
    fixed = np.flatnonzero(sampling.temperature == 0)
    if random.size or shared.size:
        tokens = tokens.copy()
    if random.size:
        rows = xp.probabilities(scale_and_truncate(xp, xp.take(logits, random), sampling, random))
        q[random] = rows
        key = draft_key(rounds[random], offset)
        tokens[random] = xp.draw(rows, rng("draft", sampling.seeds[random], key))
    if shared.size:
        law = scale_and_truncate(xp, xp.take(logits, shared), sampling, shared)
        # draft k of the block stands at the position that verify row k predicts
        position = sampling.positions[shared] + offset
        tokens[shared], _ = xp.coupled_argmax(law, sampling.seeds[shared], position)
    if fixed.size:
        q[fixed] = 0.0
        xp.set_at(q, fixed, tokens[fixed], np.ones(fixed.size))
    assert tokens.shape == (R,)
    return tokens, q


def peak_probability(logits: Any) -> npt.NDArray[np.float64]:
    """Top probability of each row's softmax, float64 [n]. logits: float [n, V]."""
    xp = backend_of(logits)
    logits = xp.widen(logits)
    ids, _ = xp.argmax(logits)
    top = xp.gather(logits, np.arange(ids.size, dtype=np.int64), ids)
    return np.exp(top - xp.normaliser(logits))


def truncate_q(q: Any, m: int) -> tuple[Any, Any]:
    """The m most likely tokens of each row and their exactly renormalised probabilities.

    q: [R, V]; returns ids int64 [R, m], probs float64 [R, m] (numpy). Sample drafts from *this*
    law: with V = 129,280 and five drafts a dense float32 q takes 2.6 MB a request.
    """
    xp = backend_of(q)
    ids, probs = xp.top(q, m)
    probs = to_host(probs)
    return ids, probs / probs.sum(axis=1, keepdims=True)
