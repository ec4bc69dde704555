"""What the balancer asks of a network, and the two transports that ship.

`Transport` has three calls; every rank of the group makes the same calls in the same order. Each
call ends within the transport's deadline: with its result, or with a TransportError after which
the group is of no more use.

`Alone` is a group of one; `GlooTransport` speaks torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import PeerLostError, ShapeError, TransportError

T = TypeVar("T")
DEADLINE_S: Final = 20.0
"""A healthy rank may be this much behind: a long prefill on one rank takes seconds."""


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
        """The values themselves."""
        return values

    def batch_p2p(
        self,
        sends: Sequence[tuple[int, npt.NDArray[Any]]],
        receives: Sequence[tuple[int, npt.NDArray[Any]]],
    ) -> None:
        """Nothing to do. Raises TransportError where a peer is named: there is none."""
        if sends or receives:
            raise TransportError("a group of one has no peers to send to or receive from")

    def barrier(self) -> None:
        """Nobody to wait for."""
        return None


def require_torch() -> Any:
    """torch with its distributed part, or an ImportError that names the extra."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import torch.distributed  # pyright: ignore
    except ImportError as e:
        raise ImportError("gloo needs torch: pip install './packages/eplb[torch]'") from e
    return torch


class GlooTransport:
    """torch.distributed on host buffers, in a gloo group of its own over the ranks of `group`.

    group:      an initialised process group of any backend; None for the default one. All its
                ranks make their transport together. The balancer's traffic has connections of its
                own, so that it neither mixes with the model's nor inherits its time limits.
    deadline_s: a call that a peer does not answer for this long raises PeerLostError.
    """

    def __init__(self, group: Any | None = None, *, deadline_s: float = DEADLINE_S) -> None:
        if not deadline_s > 0:
            raise ShapeError(f"deadline_s wants a number above 0, got {deadline_s!r}")
        self._torch: Any = require_torch()
        self._dist: Any = self._torch.distributed
        self._deadline_s = deadline_s
        self._broken: str | None = None
        if not self._dist.is_initialized():
            raise TransportError("no process group: call dist.init_process_group first")
        self._ranks: list[int] = self._dist.get_process_group_ranks(
            self._dist.group.WORLD if group is None else group
        )
        # ranks may come here minutes apart (loading weights): the wait is that of their own group
        self._dist.barrier(group=group)
        self._group: Any = self._dist.new_group(
            self._ranks,
            timeout=timedelta(seconds=deadline_s),
            backend="gloo",
            use_local_synchronization=True,
        )

    @property
    def rank(self) -> int:
        return int(self._dist.get_rank(self._group))

    @property
    def size(self) -> int:
        return len(self._ranks)

    def all_reduce_sum(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Transport.all_reduce_sum`; the argument stays as it is."""
        tensor = self._torch.from_numpy(values.copy())
        self._call("all_reduce", lambda: self._dist.all_reduce(tensor, group=self._group))
        return tensor.numpy()

    def batch_p2p(
        self,
        sends: Sequence[tuple[int, npt.NDArray[Any]]],
        receives: Sequence[tuple[int, npt.NDArray[Any]]],
    ) -> None:
        """See `Transport.batch_p2p`; returns when all of it has arrived."""

        def run() -> None:
            operations = [
                self._dist.P2POp(call, self._bytes(buffer), self._ranks[peer], self._group)
                for call, batch in ((self._dist.isend, sends), (self._dist.irecv, receives))
                for peer, buffer in batch
            ]
            if operations:
                for work in self._dist.batch_isend_irecv(operations):
                    work.wait()

        self._call("batch_p2p", run)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self._call("barrier", lambda: self._dist.barrier(group=self._group))

    def close(self) -> None:
        """Leave the group; its connections close, so that peers still waiting hear of it."""
        if self._group is not None:
            self._broken = self._broken or "it was closed"
            group, self._group = self._group, None
            if self._dist.is_initialized():
                self._dist.destroy_process_group(group)

    def _call(self, name: str, run: Callable[[], T]) -> T:
        if self._broken is not None:
            raise PeerLostError(
                f"{name}: this group is of no more use ({self._broken}): make a new transport"
            )
        try:
            return run()
        except RuntimeError as e:
            # gloo puts its source file before what happened and advice behind it
            why = str(e).partition("] ")[2].partition(". ")[0] or repr(e)
            self._broken = f"{name}: {why}"
            raise PeerLostError(
                f"a peer is gone or did not answer in {self._deadline_s:g} s, at {name}: {why}; "
                "make a new transport over the ranks that live"
            ) from e

    def _bytes(self, buffer: npt.NDArray[Any]) -> Any:
        return self._torch.from_numpy(buffer.reshape(-1).view(np.uint8))
