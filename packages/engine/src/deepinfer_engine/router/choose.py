"""Which worker takes a request: pure functions over what the router knows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from deepinfer_engine.core.types import GenerateRequest

BOUND = 0.2
"""A worker may carry this share more than the mean before locality gives way to balance. A quarter
is what a fleet shall keep; the rest is for what predictions miss."""
NEAR = 0.02
"""Scores that differ by less are equal."""
QUEUE_WEIGHT = 0.5
"""Of waiting, against work that a cache saves. Whoever moves a conversation to a shorter queue pays
now what was cached, and the next turns pay again wherever they miss it: at 1, a fleet at its limit
computed half as much again (the workload of `benches/router_workload.py`)."""
AFFINITY_TOKENS = 256
FULL = 0.85
"""A decode worker whose memory is fuller will have to park or refuse answers that grow."""
PRESSURE = 400.0
"""What that weighs: at nine tenths as much as a whole memory of tokens, at the brim as nine."""


class Holding(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def held(self) -> float:
        """Tokens in its memory: every step reads them."""
        ...

    @property
    def capacity(self) -> float:
        """Tokens that fit."""
        ...

    @property
    def late(self) -> bool:
        """Whether one more would make its tokens take longer than they should."""
        ...


W = TypeVar("W", bound=Holding)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate(Generic[T]):
    """A prefill worker as one prompt sees it, all in milliseconds.

    load: work that it has or lately had. queue_ms: what is before the prompt. cost_ms: loading what
    is cached there and computing the rest. home: the turn before was computed there.
    """

    worker: T
    address: str
    load: float
    queue_ms: float
    cost_ms: float
    home: bool = False

    @property
    def ttft_ms(self) -> float:
        """When the first token is there."""
        return self.queue_ms + self.cost_ms


def affinity_key(request: GenerateRequest) -> bytes:
    """Equal for the turns of one conversation, and for conversations with one beginning."""
    start = ",".join(map(str, request.token_ids[:AFFINITY_TOKENS]))
    return f"{request.salt}/{start}".encode()


def rendezvous(address: str, key: bytes) -> bytes:
    """Rank of a worker for a key (highest random weight): stable when other workers come and go."""
    return hashlib.blake2b(key, digest_size=8, key=address.encode()[:64]).digest()


def by_ttft(
    candidates: Sequence[Candidate[T]], key: bytes, target_ms: float | None = None
) -> Candidate[T]:
    """The one whose first token is there soonest, among those whose load stays within the bound and
    the conversation's own worker while that has nothing to do.

    Of workers that are equally good it is the conversation's own. Others, of which none has more to
    do than usual, are told apart by the key: not in turn, which would scatter a conversation, and
    not by position, which would load the first.

    With a target those that would be in time are told apart by the work that the prompt makes
    alone; where none would be, the soonest is the best.
    """
    cheapest = min(one.cost_ms for one in candidates)
    allowed = (1 + BOUND) * (sum(one.load for one in candidates) + cheapest) / len(candidates)
    least = min(one.load for one in candidates)
    eligible = [
        one
        for one in candidates
        if (one.home and not one.queue_ms)
        or one.load + one.cost_ms <= max(allowed, least + one.cost_ms)
    ]
    if target_ms is None:
        scores = [QUEUE_WEIGHT * one.queue_ms + one.cost_ms for one in eligible]
    else:
        in_time = [one for one in eligible if one.ttft_ms <= target_ms]
        scores = [one.cost_ms for one in in_time] or [one.ttft_ms for one in eligible]
        eligible = in_time or eligible
    limit = (1 + NEAR) * min(scores)
    near = [one for one, score in zip(eligible, scores, strict=True) if score <= limit]
    usual = sum(one.load for one in near) / len(near)
    quiet = [one for one in near if one.load <= usual] or near
    return max(
        [one for one in near if one.home] or quiet, key=lambda one: rendezvous(one.address, key)
    )


def by_room(workers: Sequence[W], tokens: float, key: bytes) -> W:
    """The worker whose steps will have least to read with this prompt, whose memory is not full,
    and whose tokens keep their target, if any does; equal ones are told apart by the key, not by
    position."""

    def cost(worker: W) -> float:
        after = worker.held + tokens
        over = max(0.0, after / worker.capacity - FULL)
        return after + PRESSURE * over * over * worker.capacity if over else after

    return min(workers, key=lambda w: (w.late, cost(w), rendezvous(w.address, key)))
