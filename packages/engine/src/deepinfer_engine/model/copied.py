"""Drafts for models without a draft module: copied from where their text said the same before.

Summaries, edits, code and tool results repeat their prompt; a story does not. Finding a copy costs
a look-up, so it is tried in every step, and how many copied tokens are verified follows from how
often as good a match came true and from how long steps of such a size took, both learned while
serving. Where nothing repeats, nothing is verified.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepinfer_engine.adapters.dspark import (
    BudgetScheduler,
    CounterRng,
    DraftBatch,
    LearnedStepTimes,
    NGramDrafter,
    Proposal,
    SamplingBatch,
    StepTable,
)
from deepinfer_engine.core.runner import DecodeRow, IntArray

DRAFTS, MOST_DRAFTS = 5, 7
"""Drafts a step where nobody says how many, and the most one may ask for."""
FIRST_INDEXED = 8192
"""Tokens of a prompt's end that are looked into: ten milliseconds of a request's first step."""
TOP = 512
"""Largest step, in tokens, whose time is learned; larger ones verify no drafts."""
FORGET = 512
"""Steps after which the time of a size counts no more: one unlucky trial ends nothing."""
RETIMED = 32
"""Steps after which the times of all sizes are read anew, or the first of a size at once."""
LEAST_GAIN = 0.03
"""Expected gain below which drafts are left out: the measurements are not better than that."""


class CopiedDrafts:
    """Implements `DraftSource`; made for one runner, whose slots tell the texts apart."""

    def __init__(self, length: int) -> None:
        self.most = length
        self._drafter = NGramDrafter(length, first_indexed=FIRST_INDEXED)
        self._texts: dict[int, Sequence[int]] = {}

    def propose(
        self,
        rows: Sequence[DecodeRow],
        lens: IntArray,
        length: int,
        sampling: SamplingBatch,
        rng: CounterRng,
    ) -> Proposal:
        """See `DraftSource.propose`; a row's `lengths` are what was found for it, often 0."""
        for row in rows:
            if self._texts.get(row.state_slot) is not row.history:
                self._drafter.reset(row.state_slot)
                self._texts[row.state_slot] = row.history
        positions = np.array([len(row.history) - 1 for row in rows], dtype=np.int64)
        batch = DraftBatch(
            [row.state_slot for row in rows],
            np.array([row.history[-1] for row in rows], dtype=np.int64),
            positions,
            [row.history for row in rows],
            sampling,
            positions,
            wanted=lens,
        )
        return self._drafter.propose(batch, rng)


class CopyBudget:
    """How many copied drafts a step verifies; the counterpart of `DraftBudget`.

    A copied draft is a function of the text before it, so it may be judged by its own confidence.
    """

    def __init__(self, length: int) -> None:
        self._times = LearnedStepTimes(TOP, forget=FORGET)
        self._table = StepTable.linear(1.0, 0.02, grid=1, top=TOP)
        self._scheduler = BudgetScheduler(self._table, length, "exact")
        self._sizes, self._stale = set[int](), 0

    def pays(self, sequences: int) -> bool:
        """Looking for a copy always does."""
        return sequences < TOP

    def lengths(self, proposal: Proposal, most: IntArray) -> IntArray:
        """Drafts to verify of each sequence, at most `most` and what was found."""
        found = np.minimum(proposal.lengths, most)
        none = np.zeros_like(found)
        if not found.any() or not self._times.known or proposal.conf is None:
            return none
        table, sequences = self._newest(), len(found)
        # A guess about wide steps is not staked on one step.
        room = min(2 * max(self._times.largest, sequences), TOP) - sequences
        total = min(self._scheduler.budget(proposal.conf, found, deterministic=True), room)
        chosen = np.asarray(self._scheduler.allocate(total, proposal.conf, found), dtype=np.int64)
        survives = np.cumprod(proposal.conf, axis=1)
        gained = sequences + survives[np.arange(survives.shape[1]) < chosen[:, None]].sum()
        fed = sequences + int(chosen.sum())
        pays = gained * table.cost(sequences) >= ((1 + LEAST_GAIN) * sequences * table.cost(fed))
        return chosen if pays else none

    def sits_out(self, sequences: int) -> None:
        """Nothing to do: families without a draft module share no experts, and so no steps."""

    def observe(self, lengths: IntArray, accepted: IntArray) -> None:
        """Nothing to do: the next look at the text sees what came true."""

    def timed(
        self, sequences: int, fed: int, tokens: int, milliseconds: float, *, drafted: bool
    ) -> None:
        """A step of `fed` tokens took so long."""
        self._times.record(fed, milliseconds)
        self._stale = RETIMED if fed not in self._sizes else self._stale + 1
        self._sizes.add(fed)

    def _newest(self) -> StepTable:
        """The table, made anew after some steps: that takes as long as a small model's step."""
        if self._stale >= RETIMED:
            self._table, self._stale = self._times.table(), 0
            self._scheduler.retime(self._table)
        return self._table
