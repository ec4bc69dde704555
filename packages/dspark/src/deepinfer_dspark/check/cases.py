"""Small made-up models for checks, and what a right verification does with their drafts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.reference import residual

Path = tuple[int, ...]
Law = list[float]


class Case:
    """Random target and draft distributions over `vocab` tokens as functions of the prefix.

    Some tokens have no probability under one of the two, some draft distributions are the target's:
    what real models do, and where mistakes hide.
    """

    def __init__(self, vocab: int, gamma: int, seed: int) -> None:
        self.vocab, self.gamma, self.seed = vocab, gamma, seed
        self.p, self.q = functools.cache(self._p), functools.cache(self._q)
        self.conf = functools.cache(self._conf)

    def _random(self, kind: int, prefix: Path) -> np.random.Generator:
        return np.random.default_rng([self.seed, kind, len(prefix), *prefix])

    def _p(self, prefix: Path) -> Law:
        rng = self._random(0, prefix)
        law = rng.dirichlet(np.full(self.vocab, 0.8))
        if rng.random() < 0.3:
            law[rng.integers(self.vocab)] = 0.0
        return (law / law.sum()).tolist()

    def _q(self, prefix: Path) -> Law:
        rng = self._random(1, prefix)
        if rng.random() < 0.15:
            return self._p(prefix)
        law = rng.dirichlet(np.full(self.vocab, 0.8))
        return law.tolist()

    def _conf(self, prefix: Path) -> float:
        """Confidence of the draft after the prefix; saturated ones are common."""
        rng = self._random(2, prefix)
        return 1.0 if rng.random() < 0.25 else float(rng.random())

    def paths(self) -> list[tuple[Path, float]]:
        """Every block of drafts with its probability."""
        every = itertools.product(range(self.vocab), repeat=self.gamma)
        weighed = [
            (x, float(np.prod([self.q(x[:k])[x[k]] for k in range(self.gamma)]))) for x in every
        ]
        return [(x, w) for x, w in weighed if w > 0]

    def target(self) -> npt.NDArray[np.float64]:
        """Law of the first gamma + 1 tokens, [vocab] * (gamma + 1)."""
        out = np.zeros((self.vocab,) * (self.gamma + 1))
        for text in itertools.product(range(self.vocab), repeat=self.gamma + 1):
            out[text] = np.prod([self.p(text[:k])[text[k]] for k in range(self.gamma + 1)])
        return out

    def complete(self, tokens: Path, weight: float, out: npt.NDArray[np.float64]) -> None:
        """Add the law of texts that begin with `tokens` and go on as the target does."""
        if len(tokens) > self.gamma:
            out[tokens[: self.gamma + 1]] += weight
            return
        for token, mass in enumerate(self.p(tokens)):
            if mass > 0:
                self.complete((*tokens, token), weight * mass, out)

    def verified(self, drafts: Path, length: int) -> npt.NDArray[np.float64]:
        """Law after a right verification of the first `length` drafts of a block."""
        out: Any = np.zeros((self.vocab,) * (self.gamma + 1))
        alive = 1.0
        for k in range(length):
            p, q, x = self.p(drafts[:k]), self.q(drafts[:k]), drafts[k]
            accept = min(1.0, p[x] / q[x])
            if accept < 1.0:
                for token, mass in enumerate(residual(p, q)):
                    if mass > 0:
                        self.complete((*drafts[:k], token), alive * (1 - accept) * mass, out)
            alive *= accept
        if alive > 0:
            self.complete(drafts[:length], alive, out)
        return out


def largest(found: npt.NDArray[np.float64], want: npt.NDArray[np.float64]) -> tuple[float, Path]:
    """The largest absolute deviation, and of which cell."""
    gap = np.abs(found - want)
    at: Sequence[Any] = np.unravel_index(int(gap.argmax()), gap.shape)
    return float(gap.max()), tuple(int(i) for i in at)
