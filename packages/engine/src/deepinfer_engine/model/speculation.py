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

from deepinfer_engine.adapters.dspark import BudgetScheduler, StepTable, TableError
from deepinfer_engine.core.runner import IntArray

FOREVER_S = 1e12
PROBE_STEPS = 64
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


class DraftBudget:
    """Decides step by step. Learns from what was accepted."""

    def __init__(self, times: StepTimes, length: int) -> None:
        self._times = times
        self._length = length
        self._scheduler = BudgetScheduler(times.forward, length, draft_ms=times.drafting.cost)
        self._tried, self._true = np.zeros(length), np.zeros(length)
        """Drafts at each offset behind drafts that came true, and those of them that did too."""
        self._slower: dict[tuple[int, bool], float] = {}
        """By size of the batch and whether it drafted: measured time of a step / that expected."""
        self._idle, self._patience = 0, PROBE_STEPS

    def pays(self, sequences: int) -> bool:
        """Whether drafting for so many sequences is expected to make tokens faster."""
        if self._gain(sequences) > LEAST_GAIN:
            self._idle, self._patience = 0, PROBE_STEPS
            return True
        self._idle += 1
        if self._idle < self._patience:
            return False
        self._idle, self._patience = 0, min(2 * self._patience, MOST_PROBE_STEPS)
        return True

    def lengths(self, confidence: np.ndarray | None, most: IntArray) -> IntArray:
        """Drafts to verify of each sequence, at most `most`."""
        if confidence is None:
            return most
        expected = np.broadcast_to(self._accepted(), confidence.shape)
        total = self._scheduler.budget(expected, most)
        chosen = self._scheduler.allocate(total, confidence, most)
        return np.asarray(chosen, dtype=np.int64)

    def observe(self, lengths: IntArray, accepted: IntArray) -> None:
        """What became of a step's drafts."""
        at = np.arange(self._length)[:, None]
        tried = ((lengths > at) & (accepted >= at)).sum(axis=1)
        kept = (1 - 1 / MEMORY) ** tried
        self._tried = kept * self._tried + tried
        self._true = kept * self._true + ((lengths > at) & (accepted > at)).sum(axis=1)

    def timed(self, sequences: int, drafts: int, milliseconds: float, *, drafted: bool) -> None:
        """How long a step took. Sampling and verification are in no table."""
        expected = self._times.forward.cost(sequences + drafts)
        expected += self._times.drafting.cost(sequences) if drafted else 0.0
        key, ratio = (sequences.bit_length(), drafted), milliseconds / expected
        before = self._slower.get(key, ratio)
        self._slower[key] = before + 0.2 * (ratio - before)

    def _accepted(self) -> np.ndarray:
        """Expected share at each offset; where little was tried, that of all offsets."""
        true, tried = self._true.sum(), self._tried.sum()
        mean = (true + PRIOR * PRIOR_WEIGHT) / (tried + PRIOR_WEIGHT)
        return (self._true + mean * PRIOR_WEIGHT) / (self._tried + PRIOR_WEIGHT)

    def _gain(self, sequences: int) -> float:
        """Best expected ratio of tokens a millisecond with drafts to without, minus 1."""
        survives = np.cumprod(self._accepted())
        made = 1 + np.concatenate([[0.0], np.cumsum(survives)])
        drafting = self._times.drafting.cost(sequences)
        cost = [
            self._times.forward.cost(sequences * (1 + k)) + drafting
            for k in range(self._length + 1)
        ]
        plain = 1 / self._times.forward.cost(sequences)
        size = sequences.bit_length()
        apart = self._slower.get((size, False)), self._slower.get((size, True))
        dearer = apart[1] / apart[0] if apart[0] and apart[1] else 1.0
        return float((made[1:] / np.array(cost[1:])).max() / plain / dearer - 1)
