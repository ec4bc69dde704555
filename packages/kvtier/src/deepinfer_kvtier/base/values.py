"""Values that cross the public interface: layouts, what was found, loaded and stored."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from deepinfer_kvtier.base.errors import ConfigError

KIND_CODES: dict[str, int] = {"block": 0, "state": 1}
MAX_PARTS = 16
MAX_PAYLOAD_BYTES = 1 << 30


class Part(NamedTuple):
    """One named byte range of a record: `offset` and `size` in bytes."""

    name: str
    offset: int
    size: int


def parts(*named_sizes: tuple[str, int]) -> tuple[Part, ...]:
    """Lay parts end to end: `parts(("index", 4352), ("main", 18432))`. raises: ConfigError."""
    laid: list[Part] = []
    offset = 0
    for item in named_sizes:
        if not isinstance(item, (tuple, list)) or [*map(type, item)] != [str, int]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a part is (name, bytes), got {item!r}")
        laid.append(Part(item[0], offset, item[1]))
        offset += item[1]
    return tuple(laid)


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """Geometry of the records of one model; part of the cache identity.

    block_tokens: tokens a block stands for; hits are whole blocks only.
    kinds:        "block" (required) and optionally "state", each a sequence of contiguous parts.
                  A kind of zero bytes is legal and never waited for.
    raises:       ConfigError when parts overlap, leave holes, or exceed 16 parts or 1 GiB a record.
    """

    block_tokens: int
    kinds: Mapping[str, tuple[Part, ...]]

    def __post_init__(self) -> None:
        if not isinstance(self.block_tokens, int) or not 1 <= self.block_tokens <= 65_535:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"block_tokens must be a whole number in 1 .. 65535, got {self.block_tokens!r}"
            )
        if not isinstance(self.kinds, Mapping) or "block" not in self.kinds:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f'a layout is a mapping with the kind "block", got {self.kinds!r}')
        for kind, kind_parts in self.kinds.items():
            if kind not in KIND_CODES:
                raise ConfigError(f"unknown kind {kind!r}: use one of {sorted(KIND_CODES)}")
            _check_parts(kind, kind_parts)

    def payload_bytes(self, kind: str) -> int:
        """Bytes of one record of `kind`; 0 where the layout has no such kind."""
        return sum(part.size for part in self.kinds.get(kind, ()))

    def part_sizes(self, kind: str) -> tuple[int, ...]:
        """Sizes in bytes of the parts of `kind`, in storage order."""
        return tuple(part.size for part in self.kinds.get(kind, ()))

    def canonical(self) -> dict[str, object]:
        """The layout as plain JSON values, for the fingerprint."""
        return {
            "block_tokens": self.block_tokens,
            "kinds": {kind: [list(part) for part in ps] for kind, ps in self.kinds.items()},
        }


def _check_parts(kind: str, kind_parts: tuple[Part, ...]) -> None:
    if not isinstance(kind_parts, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"kind {kind!r} needs a sequence of parts, got {kind_parts!r}")
    if len(kind_parts) > MAX_PARTS:
        raise ConfigError(f"kind {kind!r} has {len(kind_parts)} parts, at most {MAX_PARTS} work")
    offset = 0
    for part in kind_parts:
        if not isinstance(part, Part):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"kind {kind!r} needs Part(name, offset, size), got {part!r}")
        if part.size < 0 or part.offset != offset:
            raise ConfigError(
                f"part {part.name!r} of kind {kind!r} must start at byte {offset} with a size >= 0,"
                f" got offset {part.offset}, size {part.size}"
            )
        offset += part.size
    if offset > MAX_PAYLOAD_BYTES:
        raise ConfigError(f"kind {kind!r} has {offset} bytes, at most {MAX_PAYLOAD_BYTES} work")


APPROXIMATE_BIT: Final = 0x80
GENERATION_BITS: Final = 0x7F
NO_ROW: Final = 0xFFFFFFFF
"""In the `length` of a row: no such record."""


def quality_of(approximate: bool, generation: int) -> int:
    """Approximate bit and replay generation, saturating, in one byte."""
    return (APPROXIMATE_BIT if approximate else 0) | min(generation, GENERATION_BITS)


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
