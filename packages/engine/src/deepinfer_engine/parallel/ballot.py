"""Votes of a data-parallel group over gloo, on the CPU: nothing enters a device's stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepinfer_engine.errors import EngineLost


class GlooBallot:
    """Implements `Ballot` over the group that `network.join` made, whose deadline is that of every
    sum."""

    def add(self, values: Sequence[int]) -> tuple[int, ...]:
        """See `Ballot.add`."""
        sums = torch.tensor(values, dtype=torch.int64)
        try:
            dist.all_reduce(sums)
        except RuntimeError as error:
            raise EngineLost(f"a rank of the group did not vote: {error}") from error
        return tuple(sums.tolist())
