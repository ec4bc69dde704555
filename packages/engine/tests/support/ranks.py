"""Ranks of a data-parallel group as threads of a test, with toys for models."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from toy_engine import PATIENCE_S, Recorder, toy

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.toy_runner import ToyRunner
from deepinfer_engine.core.votes import Tally, Vote
from deepinfer_engine.core.voting_loop import VotingLoop
from deepinfer_engine.kv.parking import HostParking


class Sums:
    """Sums over threads; a rank that stays away breaks them for all."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=PATIENCE_S)
        self._lock = threading.Lock()
        self._given: list[tuple[int, ...]] = []
        self._sum: tuple[int, ...] = ()

    def add(self, values: Sequence[int]) -> tuple[int, ...]:
        with self._lock:
            self._given.append(tuple(values))
        if self._barrier.wait() == 0:
            assert len({len(one) for one in self._given}) == 1, "ranks voted on different things"
            self._sum = tuple(sum(column) for column in zip(*self._given, strict=True))
            self._given = []
        self._barrier.wait()
        return self._sum


@dataclass
class Rank:
    loop: VotingLoop
    sink: Recorder
    runner: ToyRunner
    seen: list[tuple[str | None, Tally, int]] = field(default_factory=list)
    """Of each step: what it was, what was voted, how many votes so far."""
    empty: int = 0
    """Passes without rows."""


def ranks_of(
    count: int, *, policy: str = "urgent", make: Callable[[], ToyRunner] = toy, **config: Any
) -> list[Rank]:
    sums, intervals = Sums(count), {}
    for name in ("prefill_attempt_interval", "prefill_any_attempt_interval"):
        if name in config:
            intervals[name] = config.pop(name)
    settings = EngineConfig(max_gap=0.0, **config)
    made: list[Rank] = []
    for _ in range(count):
        runner, sink = make(), Recorder()
        loop = VotingLoop(
            runner,
            settings,
            "both",
            parking=HostParking(runner, settings.park_bytes),
            link=None,
            sink=sink,
            ballot=sums,
            vote=Vote(count, policy, **intervals),  # type: ignore[arg-type]
        )
        rank = Rank(loop, sink, runner)
        mixed = runner.mixed

        def counted(chunks: Any, rows: Any, rank: Rank = rank, mixed: Any = mixed) -> Any:
            rank.empty += 1
            return mixed(chunks, rows)

        runner.mixed = counted  # type: ignore[method-assign]
        made.append(rank)
    return made


def step_all(ranks: Sequence[Rank], now: float) -> None:
    """One step of the group, all ranks at once."""

    def one(rank: Rank) -> None:
        rank.loop.step(now)
        rank.seen.append((rank.loop.kind, rank.loop.tally, rank.loop.sums))

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(one, ranks))
