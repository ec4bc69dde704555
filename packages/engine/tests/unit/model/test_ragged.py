"""The cost of a pass is the sum of its sequences' own: elements are counted, not seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoint import write_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_engine.core.runner import BLOCK_TOKENS
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

LONG = 16 * 1024
SHORT = 31


class Elements(TorchDispatchMode):
    """How many elements a pass writes into new tensors, and into the largest of them."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out._is_view():
            self.total += out.numel()
            self.largest = max(self.largest, out.numel())
        return out


@contextmanager
def counted() -> Iterator[Elements]:
    with Elements() as mode:
        yield mode


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    """Every prompt is imagined: its cache is zeros, which cost what any other values cost."""
    where = write_tiny(
        tmp_path_factory.mktemp("long"), max_position_embeddings=2 * LONG, num_hidden_layers=10
    )
    blocks = LONG // BLOCK_TOKENS + 2 + 2 * SHORT
    return build_runner(where, num_blocks=blocks + 30, num_state_slots=2 + SHORT, nextn=0)


def rows(start: int, count: int, slot: int, blocks: list[int]) -> SequenceRows:
    ids = np.random.default_rng(slot).integers(4, 320, size=count)
    return SequenceRows(ids, start, (5,) * min(start, 3), blocks, slot)


def cost(runner: TorchRunner, *sequences: SequenceRows) -> Elements:
    with counted() as elements:
        runner.model.forward(list(sequences), None)
    return elements


def long_and_short() -> tuple[SequenceRows, list[SequenceRows]]:
    used = LONG // BLOCK_TOKENS + 1
    long = rows(LONG - 1, 1, 1, list(range(1, used)))
    return long, [rows(100, 1, 2 + i, [used + 2 * i, used + 2 * i + 1]) for i in range(SHORT)]


def test_a_long_sequence_beside_short_ones_costs_the_sum_of_both(runner: TorchRunner) -> None:
    long, short = long_and_short()
    apart = cost(runner, long).total + cost(runner, *short).total
    assert cost(runner, long, *short).total <= 1.2 * apart


def test_a_long_prompt_beside_short_ones_costs_the_sum_of_both(runner: TorchRunner) -> None:
    long = rows(0, 1850, 1, list(range(1, 17)))
    short = [rows(0, 12, 2 + i, [20 + i]) for i in range(15)]
    apart = cost(runner, long).total + cost(runner, *short).total
    assert cost(runner, long, *short).total <= 1.2 * apart


def test_memory_of_a_step_does_not_grow_with_the_context(runner: TorchRunner) -> None:
    """But for the list of blocks and what numbers it."""
    at = [
        cost(runner, rows(length - 256, 256, 1, list(range(1, length // BLOCK_TOKENS + 1))))
        for length in (LONG // 4, LONG)
    ]
    fetched = LONG * runner.model.config.text_config.head_dim
    assert at[1].total - at[0].total <= 2 * fetched  # entries of two sources, once each
    assert at[1].largest <= fetched
