"""The distribution that drafts were drawn from, as verification asks for it.

Rejection is lossless only for a draft that was drawn from the q that came with it. What can be seen
of that is checked here: a token with no probability under its own q, or a q that is no
distribution, was not. Such a draft is not judged at all; its position is drawn from the target,
which is lossless whatever the drafter did.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Float, Int, to_host
from deepinfer_dspark.backend import backend_of
from deepinfer_dspark.proposal import Proposal, SparseQ

Bool = npt.NDArray[np.bool_]

SUM_TOLERANCE: Final = 1e-4
"""How far the sum of a float32 row may be from 1."""


class DraftLaw:
    """q of every draft over the target's vocabulary.

    tokens: int64 [R, gamma], any value where nothing is asked; vocab: size of the target's.
    A q of another width than the target's logits is that of a padded vocabulary: ids the target
    has no logit for have target probability 0.
    """

    def __init__(self, proposal: Proposal, tokens: Int, vocab: int) -> None:
        self._q, self._tokens, self._vocab = proposal.q, tokens, vocab

    def unsound(self, asked: Bool) -> Bool:
        """bool [R, gamma]; which of the drafts asked about cannot have been drawn from their q."""
        bad = asked & (self._tokens < 0)
        if self._q is None or not asked.any():
            return bad
        probs = self._q.probs if isinstance(self._q, SparseQ) else self._q
        total, least = backend_of(probs).mass(probs)
        with np.errstate(invalid="ignore"):
            proper = (np.abs(total - 1.0) <= SUM_TOLERANCE) & (least >= 0.0)
        if isinstance(self._q, SparseQ):
            listed = (to_host(self._q.ids) >= 0) | (to_host(probs) == 0)
            proper &= listed.all(axis=-1)
        bad |= asked & ~proper
        at = np.nonzero(asked & ~bad)
        bad[at] = ~(self.at(*at) > 0.0)
        return bad

    def at(self, request: Int, k: Int) -> Float:
        """q of the draft itself, float64 [n]."""
        ids = self._tokens[request, k]
        if self._q is None:
            return np.ones(request.size)
        if isinstance(self._q, SparseQ):
            probs, listed = to_host(self._q.probs), to_host(self._q.ids)
            own = np.where(listed[request, k] == ids[:, None], probs[request, k], 0.0)
            return np.asarray(own.sum(axis=1), dtype=np.float64)
        width = int(self._q.shape[2])
        inside = (ids >= 0) & (ids < width)
        found = to_host(self._q[request, k, np.where(inside, ids, 0)]).astype(np.float64)
        return np.where(inside, found, 0.0)

    def rows(self, request: Int, k: Int) -> Any:
        """q of the given drafts as dense rows [n, vocab], numpy or torch."""
        q, n = self._q, request.size
        if q is not None and not isinstance(q, SparseQ):
            rows, width = q[request, k], int(q.shape[2])
            if width >= self._vocab:
                return rows[:, : self._vocab]
            if isinstance(rows, np.ndarray):
                return np.pad(rows, ((0, 0), (0, self._vocab - width)))
            padded = rows.new_zeros((n, self._vocab))
            padded[:, :width] = rows
            return padded
        if q is None:
            ids, probs = self._tokens[request, k][:, None], np.ones((n, 1))
        else:
            ids, probs = to_host(q.ids)[request, k], to_host(q.probs)[request, k]
        known = (ids >= 0) & (ids < self._vocab)
        dense = np.zeros((n, self._vocab))
        owner = np.broadcast_to(np.arange(n)[:, None], ids.shape)
        np.add.at(dense, (owner[known], ids[known]), probs[known])
        return dense
