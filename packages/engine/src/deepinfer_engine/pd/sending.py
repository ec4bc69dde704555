"""The prefill side of a transfer: which units carry a prompt's blocks and state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from deepinfer_engine.core.runner import StepRunner
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.pd import wire
from deepinfer_engine.pd.landing import GROUP_BLOCKS, GROUP_STATE
from deepinfer_engine.pd.wire import UnitHeader

UNIT_BYTES = 2 << 20
"""Aim for the size of a unit: large enough for few frames, small enough to be read again from a
cache."""


@dataclass(frozen=True, slots=True)
class Unit:
    header: UnitHeader
    views: tuple[memoryview, ...]


@dataclass(slots=True)
class Outgoing:
    """Units of one attempt, numbered as they are made; each byte range is made exactly once."""

    runner: StepRunner
    grant_id: int
    attempt: int
    prompt_len: int
    units: list[Unit] = field(default_factory=list[Unit])
    blocks_made: int = 0
    digest: int = 0
    """Combined digest of all units so far."""

    def __post_init__(self) -> None:
        if self.runner.layout.block_bytes > wire.MAX_DATA_BYTES:
            raise ConfigError(
                f"a block of {self.runner.layout.block_bytes} bytes does not fit a data frame of "
                f"{wire.MAX_DATA_BYTES}"
            )

    def blocks(self, block_ids: Sequence[int], upto: int) -> Iterator[Unit]:
        """Units for blocks `blocks_made .. upto - 1` of this table.

        Each is made when it is asked for: sent at once, its bytes still lie in the cache that
        their digest was computed from.
        """
        for unit in self.between(block_ids, self.blocks_made, upto):
            self.blocks_made = unit.header.block_first + unit.header.block_count
            yield unit

    def between(self, block_ids: Sequence[int], begin: int, upto: int) -> Iterator[Unit]:
        """Units for blocks `begin .. upto - 1`, which were left out before."""
        layout = self.runner.layout
        step = max(1, UNIT_BYTES // layout.block_bytes)
        for first in range(begin, upto, step):
            end = min(upto, first + step)
            views = tuple(self.runner.block_bytes(b) for b in block_ids[first:end])
            start = first * layout.block_tokens
            tokens = min(self.prompt_len, end * layout.block_tokens) - start
            yield self._unit(GROUP_BLOCKS, first, end - first, start, tokens, views)

    def state(self, slot: int) -> Iterator[Unit]:
        """Units for the whole state slot; it belongs to exactly `prompt_len` tokens."""
        view = self.runner.state_bytes(slot)
        for first in range(0, len(view), UNIT_BYTES):
            part = view[first : first + UNIT_BYTES]
            yield self._unit(GROUP_STATE, first, 0, 0, self.prompt_len, (part,))

    def _unit(
        self,
        group: int,
        first: int,
        count: int,
        token_first: int,
        token_count: int,
        views: tuple[memoryview, ...],
    ) -> Unit:
        header = UnitHeader(
            grant_id=self.grant_id,
            attempt=self.attempt,
            group=group,
            unit=len(self.units),
            block_first=first,
            block_count=count,
            token_first=token_first,
            token_count=token_count,
            nbytes=sum(len(view) for view in views),
            digest=wire.unit_digest(views),
        )
        unit = Unit(header, views)
        self.units.append(unit)
        self.digest = wire.add_to_combined(self.digest, header.unit, header.digest)
        return unit
