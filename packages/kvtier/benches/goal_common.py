"""What every goal is measured with: the layout, alternating rounds, lines of the table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import deepinfer_kvtier as kvtier

BLOCK_BYTES = 113_920  # payload of one 128-token block, FP4

BATCH = 64

LAYOUT = kvtier.LayoutSpec(
    128,
    {
        "block": kvtier.parts(
            *(
                (f"L{layer}.{part}", size * (2 if layer == 20 else 1))
                for layer in (2, 8, 14, 20)
                for part, size in (("index", 4_352), ("main", 18_432))
            )
        )
    },
)

Work = Callable[[], object]


class Rounds:
    """Alternating rounds of several pieces of work; medians of wall and processor time."""

    def __init__(self, rounds: int, works: dict[str, Work]) -> None:
        self._wall: dict[str, list[float]] = {name: [] for name in works}
        self._cpu: dict[str, list[float]] = {name: [] for name in works}
        for work in works.values():
            work()
        for _ in range(rounds):
            for name, work in works.items():
                wall, cpu = time.perf_counter(), time.process_time()
                work()
                self._cpu[name].append(time.process_time() - cpu)
                self._wall[name].append(time.perf_counter() - wall)

    def wall(self, name: str) -> float:
        return statistics.median(self._wall[name])

    def cpu(self, name: str) -> float:
        return statistics.median(self._cpu[name])

    def ratio(self, ceiling: str, ours: str) -> str:
        """Speed of ours as a share of the ceiling."""
        cpu = self.cpu(ceiling) / self.cpu(ours)
        wall = self.wall(ceiling) / self.wall(ours)
        return f"{cpu:.2f} cpu, {wall:.2f} wall"


def row(goal: str, what: str, figure: str, target: str) -> None:
    print(f"{goal:<4} {what:<58} {figure:<32} goal {target}", flush=True)


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def tokens_of(blocks: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 129_280, blocks * 128 + 1).astype(np.int64)


def source_of(blocks: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
