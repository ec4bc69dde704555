"""Values that cross the public interface: what was found, loaded, stored, and what changed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

TierName = str  # "host", "disk", or the name of a further tier


class Status(enum.Enum):
    """Outcome for one record. Storage trouble is a status, never an exception."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    TIMEOUT = "timeout"
    FULL = "full"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Span:
    """A run of consecutive hit blocks in one tier: blocks `start .. start + count - 1`."""

    tier: TierName
    start: int
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StateHit:
    """The deepest state slot at or before the end of the matched blocks.

    n_blocks, n_tokens: the boundary it belongs to.
    bytes:              payload bytes of the slot.
    approximate:        it was computed from windows that bounded replay had rebuilt.
    replay_generation:  how many bounded replays lie behind it.
    """

    n_blocks: int
    n_tokens: int
    tier: TierName
    bytes: int
    approximate: bool
    replay_generation: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load brought.

    ok_prefix: leading blocks of the requested range that are completely there and verified.
    blocks:    status of each requested block.
    state:     status of the state slot; None when none was asked for.
    error:     first storage error in words, for the log; None when all went well.
    """

    ok_prefix: int
    blocks: tuple[Status, ...]
    state: Status | None
    error: str | None

    @property
    def ok(self) -> bool:
        """Everything that was asked for is there."""
        return self.ok_prefix == len(self.blocks) and self.state in (None, Status.OK)


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush` or `close` left behind.

    done:          nothing was waiting any more when the call returned.
    pending:       records still waiting for the directory.
    failed:        records given up on since the cache was opened.
    """

    done: bool
    pending: int
    failed: int

    def __add__(self, other: FlushReport) -> FlushReport:
        """What two queues left behind together."""
        return FlushReport(
            self.done and other.done, self.pending + other.pending, self.failed + other.failed
        )


@dataclass(frozen=True, slots=True)
class KVEvent:
    """A record became available in a tier, or left it.

    key, parent: first 16 bytes of the digests; parent is None where it is not known any more.
    n_blocks:    depth: the record ends at this many blocks from the start of its chain.
    """

    what: Literal["stored", "removed"]
    kind: Literal["block", "state"]
    tier: TierName
    key: bytes
    parent: bytes | None
    n_blocks: int
