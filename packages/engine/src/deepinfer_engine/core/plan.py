"""The values a scheduler hands out, and the one thing it asks for: a place to park."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from deepinfer_engine.core.runner import StepOutput
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.types import FinishReason, TokenLogprob

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens `[start, end)` of a sequence; `snapshots`: (position, spare state slot)."""

    seq: LiveSequence
    start: int
    end: int
    snapshots: tuple[tuple[int, int], ...]

    @property
    def sample(self) -> bool:
        return self.end == self.seq.prompt_len


@dataclass(slots=True)
class Progress:
    """Output tokens `index ..` of a sequence, and its end when `finish` is set."""

    seq: LiveSequence
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None


Made = tuple[LiveSequence, int, tuple[int, ...], StepOutput, FinishReason | None]
"""A sequence, how many tokens it had, which were added, of which output, and its end."""


@dataclass(eq=False, slots=True)
class Plan:
    """One step: prompt chunks, and rows of running sequences with the drafts each may verify.

    One forward pass runs both. At least one of the two is not empty, no sequence is in both.
    """

    chunks: tuple[Chunk, ...] = ()
    rows: tuple[tuple[LiveSequence, int], ...] = ()
    ends: int = 0
    """How many had ended when it was planned: while there are no more, nobody in it has."""
    roomy: bool = False
    """Whatever it and steps before it commit, no row reaches its longest."""
    stops: Set[int] = frozenset()
    """Tokens behind which some row may end."""
    made: list[Made] = field(default_factory=list[Made])
    """Once absorbed."""
    context: int = 0
    """Once settled, where a target is set: tokens that its rows have read."""
    verified: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Likewise: verified and accepted drafts of each row."""

    @property
    def sequences(self) -> list[LiveSequence]:
        """Whose memory the step uses."""
        return [chunk.seq for chunk in self.chunks] + [seq for seq, _ in self.rows]

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks for a prompt and a state slot, held on a decode worker for a sequence to come."""

    prompt_len: int
    blocks: list[int]
    state_slot: int


class Parking(Protocol):
    """Host memory for preempted sequences; called while no step is in flight."""

    def park(self, seq: LiveSequence) -> bool:
        """Copy its blocks and slot out; False when there is no room."""
        ...

    def resume(self, seq: LiveSequence) -> None:
        """Copy them into `seq.blocks` and `seq.state_slot`, and forget them."""
        ...

    def drop(self, seq: LiveSequence) -> None: ...
