"""The order in which parts of blocks arrive, for engines that start on the first layers early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from deepinfer_kvtier.errors import ConfigError
from deepinfer_kvtier.layout import Part


@dataclass(frozen=True, slots=True)
class Stage:
    """Parts that arrive together.

    ranges: (offset, size) in bytes of what is copied, neighbouring parts joined.
    """

    parts: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]


def plan_stages(parts: Sequence[Part], patterns: Sequence[str]) -> tuple[Stage, ...]:
    """One stage for each pattern, and one for the parts that none names.

    patterns: part names, or shell patterns such as "L2.*", or one of them; a part belongs to the
              first that fits.
    raises:   ConfigError for a pattern that fits no part.
    """
    left = list(range(len(parts)))
    stages: list[Stage] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not any(fnmatchcase(part.name, pattern) for part in parts):
            raise ConfigError(
                f"no part of this layout is named {pattern!r}:"
                f" it has {', '.join(part.name for part in parts)}"
            )
        chosen = [i for i in left if fnmatchcase(parts[i].name, pattern)]
        left = [i for i in left if i not in chosen]
        if chosen:
            stages.append(_stage(parts, chosen))
    if left:
        stages.append(_stage(parts, left))
    return tuple(stages)


def _stage(parts: Sequence[Part], chosen: list[int]) -> Stage:
    ranges: list[tuple[int, int]] = []
    for i in chosen:
        offset, size = parts[i].offset, parts[i].size
        if ranges and ranges[-1][0] + ranges[-1][1] == offset:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + size
        else:
            ranges.append((offset, size))
    return Stage(tuple(chosen), tuple(ranges))


class Arrivals:
    """Which parts of which blocks of one load are there. Thread-safe."""

    def __init__(
        self,
        parts: Sequence[Part],
        blocks: int,
        stages: Sequence[Stage],
        deliver: Callable[[Sequence[tuple[int, int]] | None], None] | None = None,
    ) -> None:
        self._deliver = deliver
        self.parts = parts
        self.stages = stages
        self._blocks = blocks
        self._changed = threading.Condition()
        self._there: list[set[int]] = [set() for _ in parts]
        self._ended = False

    def arrive(self, stage: Stage, blocks: Sequence[int]) -> None:
        """These blocks have the parts of a stage, bytes and checksum."""
        if self._deliver is not None and blocks:
            self._deliver(stage.ranges)
        with self._changed:
            for part in stage.parts:
                self._there[part].update(blocks)
            self._changed.notify_all()

    def whole(self, block: int) -> bool:
        """Whether every part of a block is there."""
        with self._changed:
            return all(block in there for there in self._there)

    def ready(self, pattern: str) -> bool:
        """Whether the parts that fit a pattern are there in every block. raises: ConfigError."""
        with self._changed:
            return self._ready(self._fitting(pattern))

    def wait(self, pattern: str, timeout: float | None) -> bool:
        """Wait for `ready`; False when the load ended without, or the time is over."""
        fitting = self._fitting(pattern)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._ready(fitting), timeout)
            return self._ready(fitting)

    def end(self) -> None:
        """Nothing more arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _ready(self, fitting: Sequence[int]) -> bool:
        return all(len(self._there[part]) == self._blocks for part in fitting)

    def _fitting(self, pattern: str) -> list[int]:
        fitting = [i for i, part in enumerate(self.parts) if fnmatchcase(part.name, pattern)]
        if not fitting:
            raise ConfigError(f"no part of this layout is named {pattern!r}")
        return fitting
