"""A policy at work in host memory: its mistakes cost hits, never the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepinfer_kvtier.memory.eviction import EvictionPolicy, Name, Use
from deepinfer_kvtier.memory.ownership import TailLru

logger = logging.getLogger(__name__)


class Evictable(Protocol):
    """What the policy decides about. pins: above 0 it may not leave."""

    parent: bytes
    pins: int


class GuardedPolicy:
    """Drives a policy over records by digest; the first mistake puts tail-first LRU in its place.

    A mistake is an exception, a victim that is pinned or not there, or none although there is one.
    Called under the lock of host memory.
    """

    def __init__(self, policy: EvictionPolicy, records: Mapping[Any, Evictable]) -> None:
        self.policy = policy
        self._records = records
        self.failures = 0

    def used(self, use: Use) -> None:
        """A request asked for a chain of blocks."""
        try:
            self.policy.used(use)
        except Exception as cause:
            self._replace(cause)

    def entered(self, names: Sequence[bytes], parents: Sequence[bytes], at_s: float) -> None:
        """Records came to `records`."""
        try:
            self.policy.entered(names, parents, at_s)
        except Exception as cause:
            self._replace(cause)

    def left(self, name: bytes) -> None:
        """A record left `records`."""
        try:
            self.policy.left(name)
        except Exception as cause:
            self._replace(cause)

    def victim(self) -> Any:
        """Digest of the record that leaves next; None when all are pinned."""
        try:
            return self._checked(self.policy.victim(self._is_pinned))
        except Exception as cause:
            self._replace(cause)
            return self._checked(self.policy.victim(self._is_pinned))

    def _is_pinned(self, name: Name) -> bool:
        return self._records[name].pins > 0

    def _checked(self, name: Name | None) -> Name | None:
        if name is None:
            if any(not record.pins for record in self._records.values()):
                raise LookupError("named no victim although there is one")
        elif self._records[name].pins:
            raise LookupError("named a victim that is in use")
        return name

    def _replace(self, cause: Exception) -> None:
        logger.error(
            "the eviction policy %r failed, tail-first LRU takes its place: %r", self.policy, cause
        )
        self.failures += 1
        self.policy = TailLru()
        names = list(self._records)
        self.policy.entered(names, [self._records[name].parent for name in names], 0.0)
