"""What dispatch and combine ask of a network, and the two forms that ship."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_kernels.errors import ExchangeError

__all__ = ["Alone", "Exchange", "GlooExchange"]


class Exchange(Protocol):
    """One collective over the ranks of a group, all of which call it in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(self, given: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send `sends[r]` rows of `given` [n, ...] to rank r, in rank order; returns what the ranks
        sent here, `receives[r]` rows of rank r, in rank order. Raises ExchangeError."""
        ...


class Alone:
    """The group of one."""

    rank = 0
    size = 1

    def all_to_all(self, given: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """What was given. Raises ExchangeError where that is not all that is sent."""
        if list(sends) != [given.shape[0]] or list(receives) != [given.shape[0]]:
            raise ExchangeError(
                f"a group of one sends itself all {given.shape[0]} rows, got sends {list(sends)} "
                f"and receives {list(receives)}"
            )
        return given


class GlooExchange:
    """`torch.distributed` on host tensors: the reference, and the form for CPUs.

    group: an initialised gloo process group; None for the default one. Its time limit bounds every
    call. After an error the group is of no more use.
    """

    def __init__(self, group: Any | None = None) -> None:
        """Raises ExchangeError where no process group was made."""
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ExchangeError("no process group: call dist.init_process_group first")
        self._dist: Any = dist
        self._group = group
        self.rank = int(dist.get_rank(group))
        self.size = int(dist.get_world_size(group))

    def all_to_all(self, given: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """See `Exchange.all_to_all`. Raises ExchangeError where a rank was lost or is late."""
        given = given.contiguous()
        row = given.shape[1:]
        got = given.new_empty((sum(receives), *row))
        # gloo counts in elements of the first dimension; bytes carry any type.
        width = given[:1].numel() if given.shape[0] else got[:1].numel()
        try:
            self._dist.all_to_all_single(
                got.view(torch.uint8).view(-1) if width else got.view(-1),
                given.view(torch.uint8).view(-1) if width else given.view(-1),
                [n * width * given.itemsize for n in receives],
                [n * width * given.itemsize for n in sends],
                group=self._group,
            )
        except RuntimeError as error:
            # gloo puts its source file before what happened and advice behind it
            why = str(error).partition("] ")[2].partition(". ")[0] or repr(error)
            raise ExchangeError(f"rank {self.rank} lost its group: {why}") from error
        return got
