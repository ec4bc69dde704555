"""What the balancer asks of a network, and the two transports that ship.

`Transport` has three calls; every rank of the group makes the same calls in the same order.
`Alone` is a group of one; `GlooTransport` speaks torch.distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import TransportError


class Transport(Protocol):
    """Collectives and batched point-to-point over one expert-parallel group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sum over ranks, same shape; every rank calls it, idle ones with zeros."""
        ...

    def batch_p2p(
        self,
        sends: Sequence[tuple[int, npt.NDArray[Any]]],
        receives: Sequence[tuple[int, npt.NDArray[Any]]],
    ) -> None:
        """Post all (peer, contiguous buffer) at once and wait for all; per pair in list order."""
        ...

    def barrier(self) -> None:
        """Return when every rank has called it."""
        ...


class Alone:
    """The transport of a group of one."""

    rank = 0
    size = 1

    def all_reduce_sum(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return values

    def batch_p2p(
        self,
        sends: Sequence[tuple[int, npt.NDArray[Any]]],
        receives: Sequence[tuple[int, npt.NDArray[Any]]],
    ) -> None:
        if sends or receives:
            raise TransportError("a group of one has no peers to send to or receive from")

    def barrier(self) -> None:
        return None


def require_torch() -> Any:
    """torch with its distributed part, or an ImportError that names the extra."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed  # pyright: ignore
    except ImportError as e:
        raise ImportError("gloo needs torch: pip install 'deepinfer-eplb[torch]'") from e
    return torch


class GlooTransport:
    """torch.distributed on host buffers (backend gloo); the process group must be initialised."""

    def __init__(self, group: Any | None = None) -> None:
        self._torch: Any = require_torch()
        self._dist: Any = self._torch.distributed
        self._group = group

    @property
    def rank(self) -> int:
        return int(self._dist.get_rank(self._group))

    @property
    def size(self) -> int:
        return int(self._dist.get_world_size(self._group))

    def all_reduce_sum(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        tensor = self._torch.from_numpy(values.copy())
        self._dist.all_reduce(tensor, group=self._group)
        return tensor.numpy()

    def batch_p2p(
        self,
        sends: Sequence[tuple[int, npt.NDArray[Any]]],
        receives: Sequence[tuple[int, npt.NDArray[Any]]],
    ) -> None:
        operations = [
            self._dist.P2POp(call, self._bytes(buffer), peer, self._group)
            for call, batch in ((self._dist.isend, sends), (self._dist.irecv, receives))
            for peer, buffer in batch
        ]
        if operations:
            for work in self._dist.batch_isend_irecv(operations):
                work.wait()

    def barrier(self) -> None:
        self._dist.barrier(group=self._group)

    def _bytes(self, buffer: npt.NDArray[Any]) -> Any:
        return self._torch.from_numpy(buffer.reshape(-1).view(np.uint8))
