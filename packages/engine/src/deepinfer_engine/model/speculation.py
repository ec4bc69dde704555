"""How many drafts a step verifies, or whether it drafts at all: what pays by measured step times.

Drafts cost twice: making them takes time, and verifying them makes the batch larger. Where they are
accepted seldom, or the batch is large already, a step without drafts makes more tokens a second.
Whether to draft follows what earlier steps saw; which drafts to verify follows their confidences
too. Neither changes what is sampled, see `Sampler`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_engine.adapters.dspark import (
    BudgetScheduler,
    GroupReducer,
    Proposal,
    StepTable,
    TableError,
)
from deepinfer_engine.core.runner import IntArray

FOREVER_S = 1e12
ENOUGH_STEPS, FADE = 4, 0.97
"""Steps of a kind before their rate is believed, and what a step before counts beside the next."""
PROBE_STEPS = 128
"""Where drafts do not pay, one step in so many drafts all the same: the text may have changed."""
MOST_PROBE_STEPS = 512
"""The steps between probes double up to here while probes fail: they cost time."""
MEMORY = 100
"""Drafts of one offset that count; older ones fade."""
PRIOR, PRIOR_WEIGHT = 0.6, 4.0
"""Share of drafts that come true before any was tried, and how many drafts that is worth."""
LEAST_GAIN = 0.03
"""Expected gain below which drafts are left out: the measurements are not better than that."""


def between(sizes: Sequence[int], ms: Sequence[float]) -> StepTable:
    """A table of every size up to the last: nothing is captured here, so no size is rounded up."""
    every = range(1, sizes[-1] + 1)
    return StepTable(tuple(every), tuple(np.interp(every, sizes, ms).tolist()))


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a forward pass by its tokens, and of drafting by its sequences."""

    forward: StepTable
    drafting: StepTable

    @staticmethod
    def assumed() -> StepTimes:
        """Where nothing was measured: the shape of the embedded model on one core."""
        return StepTimes(
            between((1, 6, 12, 24, 48, 96, 192), (4.8, 7.2, 8.9, 12.3, 19.0, 32.8, 52.2)),
            between((1, 2, 4, 8, 16, 32), (2.3, 2.8, 3.3, 4.5, 6.2, 10.1)),
        )

    @staticmethod
    def load(directory: Path, key: dict[str, Any]) -> StepTimes | None:
        """Those that `deepinfer calibrate` measured for this key; None where there are none."""
        try:
            parts = [
                StepTable.load(directory, {**key, "part": part}, max_age_s=FOREVER_S)
                for part in ("forward", "drafting")
            ]
        except TableError:
            return None
        forward, drafting = parts
        return None if forward is None or drafting is None else StepTimes(forward, drafting)

    def save(self, directory: Path, key: dict[str, Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.forward.save(directory, {**key, "part": "forward"})
        self.drafting.save(directory, {**key, "part": "drafting"})


@dataclass(slots=True)
class Seen:
    """Faded sums over steps of one kind; tokens of one sequence."""

    steps: float = 0.0
    tokens: float = 0.0
    milliseconds: float = 0.0

    @property
    def enough(self) -> bool:
        return self.steps > ENOUGH_STEPS - 1  # faded: four steps are 3.8

    @property
    def rate(self) -> float:
        return self.tokens / max(self.milliseconds, 1e-9)


class DraftBudget:
    """Decides step by step. Learns from what was accepted."""

    def __init__(self, times: StepTimes, length: int, group: GroupReducer | None = None) -> None:
        """group: of processes that run one step together and wait for the fullest of them. They
        choose one size for the step and each fills up to it: then `lengths` or `sits_out` is called
        once a step, in all of them."""
        self._times = times
        self._length = length
        self._group = group
        self._scheduler = BudgetScheduler(
            times.forward, length, group=group, draft_ms=times.drafting.cost
        )
        self._tried, self._true = np.zeros(length), np.zeros(length)
        """Drafts at each offset behind drafts that came true, and those of them that did too."""
        self._seen: dict[tuple[int, bool], Seen] = {}
        """Steps of this model, by size of the batch and whether they drafted."""
        self._expected: dict[int, float] = {}
        """Gains by the tables, by sequences; forgotten when drafts were verified."""
        self._idle, self._patience = 0, PROBE_STEPS

    def pays(self, sequences: int) -> bool:
        """Whether drafting for so many sequences is expected to make tokens faster."""
        if self._tries(sequences):
            return False
        if self._gain(sequences) > LEAST_GAIN:
            self._idle, self._patience = 0, PROBE_STEPS
            return True
        self._idle += 1
        if self._idle < self._patience:
            return False
        self._idle, self._patience = 0, min(2 * self._patience, MOST_PROBE_STEPS)
        return True

    def lengths(self, proposal: Proposal, most: IntArray) -> IntArray:
        """Drafts to verify of each sequence, at most `most`."""
        confidence = proposal.conf
        if confidence is None:
            self.sits_out(len(most))
            return most
        expected = np.broadcast_to(self._accepted(), confidence.shape)
        total = self._scheduler.budget(expected, most)
        chosen = self._scheduler.allocate(total, confidence, most)
        return np.asarray(chosen, dtype=np.int64)

    def sits_out(self, sequences: int) -> None:
        """A step in which so many sequences have no drafts."""
        if self._group is not None:
            none = np.zeros(sequences, dtype=np.int64)
            self._scheduler.budget(np.zeros((sequences, self._length)), none)

    def observe(self, lengths: IntArray, accepted: IntArray) -> None:
        """What became of a step's drafts."""
        self._expected.clear()
        at = np.arange(self._length)[:, None]
        tried = ((lengths > at) & (accepted >= at)).sum(axis=1)
        kept = (1 - 1 / MEMORY) ** tried
        self._tried = kept * self._tried + tried
        self._true = kept * self._true + ((lengths > at) & (accepted > at)).sum(axis=1)

    def timed(
        self, sequences: int, fed: int, tokens: int, milliseconds: float, *, drafted: bool
    ) -> None:
        """What a step made and how long it took: sampling and verification are in no table."""
        seen = self._seen.setdefault((sequences.bit_length(), drafted), Seen())
        seen.steps = FADE * seen.steps + 1
        seen.tokens = FADE * seen.tokens + tokens / sequences
        seen.milliseconds = FADE * seen.milliseconds + milliseconds

    def _accepted(self) -> np.ndarray:
        """Expected share at each offset; where little was tried, that of all offsets."""
        true, tried = self._true.sum(), self._tried.sum()
        mean = (true + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
        return (self._true + mean * PRIOR_WEIGHT) / (self._tried + PRIOR_WEIGHT)

    def _tries(self, sequences: int) -> bool:
        """Whether a step without drafts is wanted: there are some with, and none to compare."""
        size = sequences.bit_length()
        with_, without = self._seen.get((size, True)), self._seen.get((size, False))
        return with_ is not None and with_.enough and not (without and without.enough)

    def _gain(self, sequences: int) -> float:
        """Ratio of tokens a millisecond with drafts to without, minus 1: as it was, or where too
        little was seen, as the tables have it."""
        size = sequences.bit_length()
        with_, without = self._seen.get((size, True)), self._seen.get((size, False))
        if with_ and without and with_.enough and without.enough:
            return with_.rate / without.rate - 1
        if sequences not in self._expected:
            self._expected[sequences] = self._expected_gain(sequences)
        return self._expected[sequences]

    def _expected_gain(self, sequences: int) -> float:
        survives = np.cumprod(self._accepted())
        made = 1 + np.concatenate([[0.0], np.cumsum(survives)])
        drafting = self._times.drafting.cost(sequences)
        cost = [
            self._times.forward.cost(sequences * (1 + k)) + drafting
            for k in range(self._length + 1)
        ]
        plain = 1 / self._times.forward.cost(sequences)
        return float((made[1:] / np.array(cost[1:])).max() / plain - 1)
