"""Which worker takes a request: pure functions over what the router knows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from deepinfer_engine.core.types import GenerateRequest

BOUND = 0.25
"""A worker may carry this share more than the mean before affinity gives way to balance."""
AFFINITY_TOKENS = 256


class Loaded(Protocol):
    @property
    def address(self) -> str: ...

    @property
    def load(self) -> float:
        """What this router has given it and not got back yet, in tokens."""
        ...


W = TypeVar("W", bound=Loaded)


def affinity_key(request: GenerateRequest) -> bytes:
    """Equal for the turns of one conversation, and for conversations with one beginning."""
    start = ",".join(map(str, request.token_ids[:AFFINITY_TOKENS]))
    return f"{request.salt}/{start}".encode()


def rendezvous(address: str, key: bytes) -> bytes:
    """Rank of a worker for a key (highest random weight): stable when other workers come and go."""
    return hashlib.blake2b(key, digest_size=8, key=address.encode()[:64]).digest()


def by_affinity(workers: Sequence[W], key: bytes, added: float) -> W:
    """The worker this key belongs to, among those whose load stays within the bound."""
    allowed = (1 + BOUND) * (sum(w.load for w in workers) + added) / len(workers)
    least = min(w.load for w in workers)
    eligible = [w for w in workers if w.load + added <= max(allowed, least + added)]
    return max(eligible, key=lambda w: rendezvous(w.address, key))


def by_load(workers: Sequence[W], key: bytes) -> W:
    """The least loaded worker; equal loads are told apart by the key, not by position."""
    return min(workers, key=lambda w: (w.load, rendezvous(w.address, key)))
