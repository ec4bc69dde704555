"""Votes of a data-parallel group over gloo, on the CPU: nothing enters a device's stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from deepinfer_engine.errors import EngineLost


class GlooSums:
    """Implements dspark's `GroupReducer` over the same group."""

    def all_reduce_sum(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """See `GroupReducer.all_reduce_sum`. Raises EngineLost."""
        sums = torch.from_numpy(values.copy())
        try:
            dist.all_reduce(sums)
        except RuntimeError as error:
            raise EngineLost(f"a rank of the group did not tell its drafts: {error}") from error
        return sums.numpy()


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
