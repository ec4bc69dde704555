"""Measuring the step times of a model: what `deepinfer calibrate` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_engine.adapters.dspark import CounterRng, StepTable
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
REPEATS = 7


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
    model: LoadedModel, length: int, *, clock: Callable[[], float] = time.process_time
) -> StepTimes:
    """Times of forward passes and of drafting for 1 to 32 sequences of `length` drafts.

    The model's pools hold at least 65 blocks and 33 slots; their contents are lost. CPU time is
    the clock: neighbours of this process do not change it.
    """
    drafts = model.drafts
    assert drafts is not None, "a model without a draft module needs no calibration"
    sizes = sorted({n * (1 + k) for n in SEQUENCES for k in (0, length // 2, length)})
    threads = torch.get_num_threads()

    def forward(tokens: int) -> None:
        n = next(s for s in reversed(SEQUENCES) if tokens % s == 0 and tokens // s <= 1 + length)
        per = tokens // n
        model.forward([_rows(i, per, model.lookback) for i in range(n)], None)

    def per_thread() -> float:
        return clock() / threads

    def table(step: Callable[[int], object], at: Sequence[int]) -> StepTable:
        measured = StepTable.measure(step, at, repeats=REPEATS, clock=per_thread)
        return between(measured.sizes, measured.ms)

    return StepTimes(table(forward, sizes), table(lambda n: _draft(drafts, n, length), SEQUENCES))


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
