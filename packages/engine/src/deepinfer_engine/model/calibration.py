"""Measuring the step times of a model: what `deepinfer calibrate` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_engine.adapters.dspark import CounterRng
from deepinfer_engine.core.device import Device
from deepinfer_engine.core.runner import BLOCK_TOKENS, DecodeRow
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.family import DraftSource, LoadedModel
from deepinfer_engine.model.sampling import sampling_batch
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.speculation import StepTimes, between

SEQUENCES = (1, 2, 4, 8, 16, 32)
CONTEXT = 200
"""Tokens before each measured row: a block and a part of one."""
_BLOCKS = 2
ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, and how far to believe it."""

    times: StepTimes
    spread: float
    """Median time of a size over its fastest, of the median size: 1.0 where nobody disturbed."""


def steps_home() -> Path:
    """Where measured tables live: `$XDG_CACHE_HOME/deepinfer/steps`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepinfer" / "steps"


def step_key(model: LoadedModel, dtype: str, device: Device) -> dict[str, Any]:
    """Everything the times depend on that is known beforehand."""
    return {
        "model": model.layout.layout_hash,
        "dtype": dtype,
        "device": device.name,
        "threads": torch.get_num_threads(),
    }


def measure(
    model: LoadedModel,
    length: int,
    *,
    clock: Callable[[], float] = time.process_time,
    heard: Callable[[int, int], object] = lambda done, of: None,
) -> Measured:
    """Times of forward passes and of drafting for 1 to 32 sequences of `length` drafts.

    The model's pools hold at least 65 blocks and 33 slots; their contents are lost. Every size is
    timed once a round, and its fastest round counts: CPU time is the clock, but where others take
    the processors a thread that waits for its neighbour burns it too, and what is disturbed differs
    from round to round. heard(done, of) is called after each timing.
    """
    drafts = model.drafts
    assert drafts is not None, "a model without a draft module needs no calibration"
    sizes = sorted({n * (1 + k) for n in SEQUENCES for k in (0, length // 2, length)})
    threads = torch.get_num_threads()

    def forward(tokens: int) -> None:
        n = next(s for s in reversed(SEQUENCES) if tokens % s == 0 and tokens // s <= 1 + length)
        per = tokens // n
        model.forward([_rows(i, per, model.lookback) for i in range(n)], None)

    steps: list[Callable[[], None]] = [partial(forward, size) for size in sizes]
    steps += [partial(_draft, drafts, n, length) for n in SEQUENCES]
    ms = np.empty((ROUNDS, len(steps)))
    for step in steps:
        step()  # the first of a shape allocates, and chooses its kernels
    for done in range(ms.size):
        row, column = divmod(done, len(steps))
        begun = clock()
        steps[column]()
        ms[row, column] = (clock() - begun) * 1e3 / threads
        heard(done + 1, ms.size)
    best = ms.min(axis=0)
    times = StepTimes(
        between(sizes, best[: len(sizes)].tolist()), between(SEQUENCES, best[len(sizes) :].tolist())
    )
    return Measured(times, float(np.median(np.median(ms, axis=0) / best)))


def _rows(sequence: int, tokens: int, lookback: int) -> SequenceRows:
    first = 1 + sequence * _BLOCKS
    ids = np.arange(3, 3 + tokens, dtype=np.int64)
    return SequenceRows(
        ids, CONTEXT, tuple(range(3, 3 + lookback)), range(first, first + _BLOCKS), 1 + sequence
    )


def _draft(drafts: DraftSource, sequences: int, length: int) -> None:
    greedy = SamplingParams(temperature=0)
    history = list(range(3, 4 + CONTEXT))
    rows = [
        DecodeRow(
            history,
            CONTEXT,
            range(1 + i * _BLOCKS, 1 + (i + 1) * _BLOCKS),
            1 + i,
            greedy,
            length,
        )
        for i in range(sequences)
    ]
    sampling = sampling_batch(
        [greedy] * sequences, [history] * sequences, [CONTEXT] * sequences, ()
    )
    assert CONTEXT + length < BLOCK_TOKENS * _BLOCKS
    drafts.propose(rows, np.full(sequences, length), length, sampling, CounterRng())
