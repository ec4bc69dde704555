"""One process's place in a group that shares the experts of a model: `ExpertSeat`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.adapters.eplb import (
    Balancer,
    CommitError,
    EplbError,
    GlooTransport,
    MeasuredGate,
    StepEvent,
    dispatch,
    initial_placement,
    slots_for,
)
from deepinfer_engine.adapters.kernels import (
    Exchange,
    ExchangeError,
    GlooExchange,
    ep_combine,
    ep_dispatch,
)
from deepinfer_engine.core.runner import IntArray
from deepinfer_engine.errors import ConfigError, EngineLost
from deepinfer_engine.parallel.memory import mapped
from deepinfer_engine.parallel.messages import Balancing

log = logging.getLogger(__name__)

_CHECKS = 10
"""Times the balance is looked at between two plans."""
_WEIGHT = 0.05
"""Of one step in the moving average of what experts cost."""


class Seat:
    """Implements `ExpertSeat`. Not thread-safe: the step's thread calls, and at start the main."""

    def __init__(
        self,
        rank: int,
        size: int,
        pools: Mapping[str, int],
        balancing: Balancing,
        *,
        told: Callable[[StepEvent], None] = lambda event: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """pools: descriptors of `memory.create`. told: hears what the balancer did, each step."""
        self.rank, self.size = rank, size
        self._pools, self._balancing = pools, balancing
        self._told, self._clock = told, clock
        self._weights: Sequence[Sequence[Tensor]] = ()
        self._experts = self.slots = 0
        self._exchange: Exchange | None = None
        self._transport: GlooTransport | None = None
        self._balancer: Balancer | None = None
        self._counts = np.zeros((0, 0), dtype=np.int64)
        self._step = 0
        self._moe_s = self._moe_step_s = 0.0
        self.failed_commits = 0
        """Layers that some process could not switch."""
        self.exchange_s = 0.0
        """Seconds spent in dispatch and combine, waiting for others included; since the start."""

    # -- ExpertSeat -----------------------------------------------------------------------------

    def place(self, layers: int, experts: int) -> IntArray:
        """See `ExpertSeat.place`."""
        if self.size > experts:
            raise ConfigError(
                f"ep: {self.size} processes cannot share {experts} experts a layer: at most "
                f"{experts}"
            )
        self._experts = experts
        self.slots = slots_for(experts, self._balancing.redundant, self.size)
        placement = initial_placement(layers, experts, self.slots)
        self._counts = np.zeros((layers, self.slots_here), dtype=np.int64)
        own = slice(self.rank * self.slots_here, (self.rank + 1) * self.slots_here)
        return placement[:, own].astype(np.int64)

    def memory(self, name: str, nbytes: int) -> Tensor:
        """See `ExpertSeat.memory`."""
        return mapped(self._pools[name], nbytes)

    def hold(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """See `ExpertSeat.hold`."""
        self._weights = weights

    def routed(
        self,
        layer: int,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """See `ExpertSeat.routed`."""
        exchange, balancer = self._exchange, self._balancer
        assert exchange is not None, "the group was not joined"
        assert balancer is not None
        began = self._clock()
        slots = dispatch(
            experts.numpy(),
            balancer.log2phy[layer],
            balancer.logcnt[layer],
            layer=layer,
            step=self._step,
        )
        try:
            here = ep_dispatch(x, torch.from_numpy(slots), weights, self.slots_here, exchange)
            arrived = self._clock()
            y = compute(here.x, here.slots[:, None], here.weights[:, None])
            computed = self._clock()
            out = ep_combine(y, here, exchange)
        except ExchangeError as error:
            raise EngineLost(f"experts of layer {layer}: {error}") from error
        ended = self._clock()
        self._counts[layer] += here.counts.numpy()
        self._moe_step_s += computed - arrived
        self.exchange_s += (arrived - began) + (ended - computed)
        return out

    # -- the group ------------------------------------------------------------------------------

    @property
    def slots_here(self) -> int:
        return self.slots // self.size

    @property
    def step(self) -> int:
        """Forward passes so far; the same in every process."""
        return self._step

    @property
    def rearranging(self) -> bool:
        """Whether a plan is being made or carried out."""
        return self._balancer is not None and self._balancer.rearranging

    def join(self, exchange: GlooExchange, deadline_s: float) -> None:
        """Take part from now on; collective, after the weights were read."""
        self._exchange = exchange
        self._transport = GlooTransport(deadline_s=deadline_s)
        every = self._balancing.every
        check = max(1, every // _CHECKS)
        self._balancer = Balancer(
            len(self._weights),
            self._experts,
            self.size,
            self.slots,
            transport=self._transport,
            weights=self._weights if every else None,
            check_every=check,
            rearrange_every=-(-every // check) * check if every else 1,
            record_every=max(1, min(10, check // 4)),
            plan_steps=min(50, check),
            gate=MeasuredGate(
                moe_s=lambda: self._moe_s,
                expert_bytes=float(sum(w[0].nbytes for w in self._weights[0])),
            ),
        )

    def ended(self) -> None:
        """A forward pass is over: count it, and move experts if that is due; collective.

        Raises EngineLost where a process was lost."""
        self._step += 1
        counts = self._counts.copy()
        self._counts[:] = 0
        self._moe_s += (_WEIGHT if self._step > 1 else 1.0) * (self._moe_step_s - self._moe_s)
        self._moe_step_s = 0.0
        balancer = self._balancer
        assert balancer is not None, "the group was not joined"
        if not self._balancing.every:
            return
        try:
            event = balancer.step(counts)
        except CommitError as error:
            # The old layer is in force everywhere, and the next plan may do better.
            self.failed_commits += 1
            log.warning("experts stay where they are: %s", error)
            return
        except EplbError as error:
            raise EngineLost(f"moving experts failed: {error}") from error
        self._told(event)

    def close(self) -> None:
        """Stop balancing and leave its group."""
        if self._balancer is not None:
            self._balancer.close()
        if self._transport is not None:
            self._transport.close()
