"""Tensor-parallel groups: all ranks use the same prefix, and one of them writes what all hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_kvtier.api.namespace import Namespace
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.identity import TokenIds
from deepinfer_kvtier.flow.handles import Match

Gather = Callable[[int], Sequence[int]]


class GroupAgree:
    """Agreement of one rank with its group; every rank makes the same calls in the same order.

    gather: gives every rank's value to every rank, in rank order. With torch.distributed:
            `lambda n: gather_list(n)` over `all_gather_object`; threads: `GroupAgree.local`.
    raises: ConfigError from a call whose gather did not answer for `size` ranks.
    """

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"a group needs 0 <= rank < size, got rank {rank} of {size}")
        self.rank = rank
        self.size = size
        self._gather = gather

    @classmethod
    def local(cls, size: int) -> list[GroupAgree]:
        """A group of threads in this process, one member each."""
        values = [0] * size
        barrier = threading.Barrier(size)

        def gather_of(rank: int) -> Gather:
            def gather(value: int) -> Sequence[int]:
                values[rank] = value
                barrier.wait()
                seen = list(values)
                barrier.wait()  # nobody may overwrite before all have looked
                return seen

            return gather

        return [cls(rank, size, gather_of(rank)) for rank in range(size)]

    def min(self, n: int) -> int:
        """The least value of all ranks."""
        return min(self._all(n))

    def match(self, ns: Namespace, tokens: TokenIds, **keywords: Any) -> Match:
        """`ns.match` on every rank, shortened until all ranks have the same hit.

        A rank that found less shortens the others; since a shorter prefix may end where another
        rank has no state, the ranks look again until they agree, at 0 blocks at the latest.
        """
        limit: int | None = keywords.pop("max_blocks", None)
        while True:
            match = ns.match(tokens, max_blocks=limit, **keywords)
            hits = self._all(match.n_blocks)
            if len(set(hits)) == 1:
                return match
            match.release()
            limit = min(hits)

    def writes(self, digest: bytes) -> bool:
        """Whether this rank stores a record that all ranks hold alike: one rank for each digest."""
        return int.from_bytes(digest[:8], "little") % self.size == self.rank

    def _all(self, value: int) -> Sequence[int]:
        values = self._gather(value)
        if len(values) != self.size:
            raise ConfigError(f"the group has {self.size} ranks, gather answered {len(values)}")
        return values
