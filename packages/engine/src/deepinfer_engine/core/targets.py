"""Targets of time: how long a token, and how long a first token, may take, and what follows.

Steps of running sequences are seen, not modelled beforehand: what one takes is fitted to its
positions (anchors and drafts) and to the context that it reads, newer steps counting more. From
that follows how many sequences may run beside one another, how many drafts are worth their time,
and how long a step may be that reads prompts besides. Prompts are read at the rate that steps have
shown; whose first token can no longer be in time stands behind those whose can, and keeps a part of
each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FORGET = 0.98
"""What a step counts for when another one was seen: about the last fifty matter."""
ENOUGH = 3
"""Steps seen before anything is predicted."""
FAR = 4.0
"""A step that took so many times what was predicted was disturbed, and counts as that long."""

DOUBT = np.array((1e-4, 1e-4, 1e-2))
"""How much has to be seen of each part before it is believed: of context most, since it grows with
every step, and far more of it may come with one prompt."""


def _fit() -> NDArray[np.float64]:
    return np.zeros((3, 3))


def _sums() -> NDArray[np.float64]:
    return np.zeros(3)


@dataclass(slots=True)
class StepTimes:
    """Seconds of a step: a fixed part, one for each position and one for each token of context."""

    seen: int = 0
    _products: NDArray[np.float64] = field(default_factory=_fit)
    _towards: NDArray[np.float64] = field(default_factory=_sums)
    _found: NDArray[np.float64] | None = None

    def saw(self, positions: int, context: int, seconds: float) -> None:
        guess = self.seconds(positions, context)
        if guess:
            seconds = min(seconds, FAR * guess)
        row = np.array((1.0, float(positions), float(context)))
        self._products = FORGET * self._products + np.outer(row, row)
        self._towards = FORGET * self._towards + row * seconds
        self.seen += 1
        self._found = None

    def seconds(self, positions: int, context: int) -> float | None:
        """Of such a step; None while too little was seen."""
        if self.seen < ENOUGH:
            return None
        if self._found is None:
            self._found = self._solved()
        return float(self._found @ (1.0, positions, context))

    def _solved(self) -> NDArray[np.float64]:
        """No part is negative. Where steps were all alike the fixed part and that of positions
        share them, so that more sequences are thought neither free nor in proportion."""
        scale = np.sqrt(np.maximum(np.diag(self._products) / self._products[0, 0], 1e-12))
        left = [0, 1, 2]
        while True:
            part = np.ix_(left, left)
            scaled = self._products[part] / np.outer(scale[left], scale[left])
            ridge = self._products[0, 0] * np.diag(DOUBT[left])
            found = np.linalg.solve(scaled + ridge, self._towards[left] / scale[left])
            if len(left) == 1 or found.min() >= 0:
                parts = np.zeros(3)
                parts[left] = np.maximum(found, 0.0) / scale[left]
                return parts
            left.pop(int(found.argmin()))


@dataclass(slots=True)
class TokenTarget:
    """Seconds a token may take, of each running sequence. 0: nothing is held back for it."""

    target: float
    nextn: int
    """Drafts a step may verify for a sequence."""
    times: StepTimes = field(default_factory=StepTimes)
    _accepted: float = 0.0
    _refused: float = 0.0

    def step(
        self, rows: int, context: int, drafts: Sequence[tuple[int, int]], seconds: float
    ) -> None:
        """A step without prompt tokens is over; (verified, accepted) drafts of each sequence."""
        if not self.target or rows < 1 or seconds <= 0:
            return
        self.times.saw(rows + sum(n for n, _ in drafts), context, seconds)
        self._accepted = FORGET * self._accepted + sum(k for _, k in drafts)
        self._refused = FORGET * self._refused + sum(k < n for n, k in drafts)

    def token_seconds(self, rows: int, context: int, drafts: int | None = None) -> float | None:
        """What a token takes with so many sequences; with the drafts that suit it best, if not
        said. None: not known yet."""
        if rows < 1:
            return 0.0
        if drafts is None:
            drafts = self.drafts(rows, context)
        step = self.times.seconds(rows * (1 + drafts), context)
        return None if step is None else step / self._tokens(drafts)

    def drafts(self, rows: int, context: int) -> int:
        """The most a sequence may verify in a step so that its tokens are in time, or, where they
        cannot be, those with which they come soonest."""
        if not self.target or rows < 1 or not self.nextn:
            return self.nextn
        best, soonest = self.nextn, math.inf
        for drafts in range(self.nextn, -1, -1):
            each = self.token_seconds(rows, context, drafts)
            if each is None or each <= self.target:
                return drafts
            if each < soonest:
                best, soonest = drafts, each
        return best

    def admits(self, rows: int, context: int, more: int) -> bool:
        """Whether one with so many tokens may run beside those. The first always may."""
        if not self.target or rows < 1:
            return True
        each = self.token_seconds(rows + 1, context + more)
        return each is None or each <= self.target

    def room(self, rows: int, context: int, most: int) -> int:
        """How many more of the usual length may run, at most `most`."""
        usual = context // rows if rows else 0
        for more in range(most):
            if not self.admits(rows + more, context + more * usual, usual):
                return more
        return most

    def step_seconds(self) -> float:
        """How long a step may be, with what it commits for each sequence; without end where no
        target is set."""
        return self.target * self._tokens(self.nextn) if self.target else math.inf

    def _tokens(self, drafts: int) -> float:
        """What a step commits for a sequence, by the share of drafts that were accepted."""
        judged = self._accepted + self._refused
        share = self._accepted / judged if judged else 0.0
        if share >= 1:
            return 1.0 + drafts
        return (1 - share ** (drafts + 1)) / (1 - share)


@dataclass(slots=True)
class FirstTokenTarget:
    """Seconds a first token may take from a prompt's arrival. 0: none is looked at."""

    target: float
    _rate: float | None = None
    """Prompt tokens a second."""

    def step(self, prompt_tokens: int, seconds: float) -> None:
        """A step that reads prompts is over."""
        if self.target and prompt_tokens and seconds > 0:
            seen = prompt_tokens / seconds
            self._rate = seen if self._rate is None else 0.8 * self._rate + 0.2 * seen

    def slack(self, arrival: float, left: int, now: float) -> float:
        """Seconds that a prompt of which so much is left may still wait; below 0 it is late."""
        if not self.target:
            return math.inf
        needs = left / self._rate if self._rate else 0.0
        return arrival + self.target - now - needs
