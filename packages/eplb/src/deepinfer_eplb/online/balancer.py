"""Balancing while serving: record, check, plan in the background, commit layer by layer.

Every rank calls `step` once per engine step, busy or idle, and takes every decision from the same
all-reduced numbers at the same step, so that no collective is ever missed. Rank 0 plans and all
take over its plan: equal inputs do not make equal plans on machines that round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_placement, check_count, check_topology
from deepinfer_eplb.errors import EplbError, ShapeError
from deepinfer_eplb.evaluation import Evaluation, evaluate
from deepinfer_eplb.online.plan_exchange import share_plan
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.placement import initial_placement, maps_of
from deepinfer_eplb.planning.planner import Plan, plan
from deepinfer_eplb.rearrange.layer import Array, allocate_staging, rearrange_layer
from deepinfer_eplb.rearrange.movement import movement
from deepinfer_eplb.rearrange.transport import Alone, Transport


@dataclass(frozen=True, slots=True)
class Gate:
    """When a plan is worth its move: steps * t_moe_s * (old_B - predicted_B) > move time.

    t_moe_s:      seconds a step spends in MoE layers at B = 1.
    expert_bytes: bytes of one expert, side tensors included.
    bytes_per_s:  rate at which one rank receives.
    """

    t_moe_s: float = 0.02
    expert_bytes: float = 13.4e6
    bytes_per_s: float = 5e9

    def worth(self, made: Plan, steps_until_next: int) -> bool:
        """Whether the time saved until the next plan exceeds the time of the move."""
        if made.old_B is None:
            return True
        L, S = made.phy2log.shape
        move_s = made.moved * L * S / made.num_gpus * self.expert_bytes / self.bytes_per_s
        return steps_until_next * self.t_moe_s * (made.old_B - made.predicted_B) > move_s


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What happened at a step.

    checked:   balance of the placement in force over the window, at check steps.
    decided:   the plan that was made, at the step it was taken up, and whether it was accepted.
    accepted:  None unless `decided` is set.
    committed: layers whose maps changed in this step.
    """

    checked: Evaluation | None = None
    decided: Plan | None = None
    accepted: bool | None = None
    committed: tuple[int, ...] = ()


class Balancer:
    """Owner of the maps of one expert-parallel group; one instance a rank.

    weights: for each layer the list of arrays [C, ...] of this rank's slots, moved in place; None
             when the caller moves weights itself (`on_commit`).
    initial: int [L, S], the placement in force at the start; None for `initial_placement`, which
             the first plan then replaces without regard to what moves.
    check_every, rearrange_every: steps; the first rearrangement comes after a quarter of it.
    record_every: steps between two recorded ones.
    plan_steps: steps a plan may take in the background before all ranks wait for it.
    layers_per_step: layers whose movement is carried out in one step.
    on_commit: called with (layer, phy2log row) after a layer's weights arrived everywhere.

    phy2log [L, S], log2phy [L, E, R+1] (-1 padded, the valid ones first) and logcnt [L, E] are
    int32 arrays updated in place, so that captured graphs may hold their addresses.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        num_gpus: int,
        num_slots: int,
        *,
        transport: Transport | None = None,
        weights: Sequence[Sequence[Array]] | None = None,
        initial: Any | None = None,
        window: LoadWindow | None = None,
        gate: Gate | None = None,
        check_every: int = 1000,
        rearrange_every: int = 10_000,
        record_every: int = 10,
        plan_steps: int = 50,
        layers_per_step: int = 1,
        ranks_per_node: int | None = None,
        num_groups: int = 1,
        num_nodes: int = 1,
        max_swaps: int = 64,
        on_commit: Callable[[int, npt.NDArray[np.int32]], None] | None = None,
    ) -> None:
        check_count("layers", layers)
        check_count("experts", experts)
        check_topology(experts, num_gpus, num_slots)
        self._transport: Transport = Alone() if transport is None else transport
        if self._transport.size not in (1, num_gpus):
            raise ShapeError(
                f"the transport has {self._transport.size} ranks, the placement {num_gpus}"
            )
        if min(check_every, rearrange_every, record_every, layers_per_step) < 1 or plan_steps < 0:
            raise ShapeError("Balancer wants positive intervals and plan_steps >= 0")
        if rearrange_every % check_every:
            raise ShapeError(
                f"rearrange_every ({rearrange_every}) must be a multiple of check_every "
                f"({check_every}): plans are made from the loads all-reduced at a check"
            )
        self.num_gpus, self._experts = num_gpus, experts
        start = initial_placement(layers, experts, num_slots) if initial is None else initial
        self.phy2log = as_placement(start, experts, "initial").copy()
        if self.phy2log.shape != (layers, num_slots):
            raise ShapeError(f"initial wants shape {(layers, num_slots)}, got {self.phy2log.shape}")
        self.log2phy = np.full((layers, experts, num_slots - experts + 1), -1, dtype=np.int32)
        self.logcnt = np.zeros((layers, experts), dtype=np.int32)
        for layer in range(layers):
            self._set_maps(layer)
        self._window = LoadWindow(layers, experts) if window is None else window
        self._gate = Gate() if gate is None else gate
        self._check_every, self._rearrange_every = check_every, rearrange_every
        self._record_every, self._plan_steps = record_every, plan_steps
        self._layers_per_step, self._ranks_per_node = layers_per_step, ranks_per_node
        if num_groups == num_nodes == 1 and ranks_per_node and num_gpus % ranks_per_node == 0:
            num_nodes = num_gpus // ranks_per_node  # a global plan that knows what a move costs
        self._plan_args = {"num_groups": num_groups, "num_nodes": num_nodes, "max_swaps": max_swaps}
        self._weights, self._on_commit = weights, on_commit
        held = num_slots if self._transport.size == 1 else num_slots // num_gpus
        sizes = [{len(w) for w in layer} for layer in weights or ()]
        if weights is not None and sizes != [{held}] * layers:
            raise ShapeError(
                f"weights wants for each of {layers} layers arrays of {held} slots, got {sizes}"
            )
        self._staging = None if not weights else allocate_staging(weights[0])
        self._slots = slice(
            self._transport.rank * num_slots // num_gpus,
            (self._transport.rank + 1) * num_slots // num_gpus,
        )
        # the first plan comes after a quarter of the interval, on a check step
        self._step = 0
        self._closed = False
        self._first = max(check_every, rearrange_every // 4 // check_every * check_every)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="eplb-plan")
        self._pending: tuple[int, Future[Plan] | None] | None = None
        # nothing is worth keeping of a placement that no load was ever asked about
        self._fresh = initial is None
        self._queue: list[tuple[int, npt.NDArray[np.int32]]] = []

    @property
    def rearranging(self) -> bool:
        """Whether a plan is being made or carried out."""
        return self._pending is not None or bool(self._queue)

    def local_experts(self) -> npt.NDArray[np.int32]:
        """int32 [L, C]; logical experts of this rank's slots (a group of one sees all slots)."""
        return self.phy2log if self._transport.size == 1 else self.phy2log[:, self._slots]

    def records_next(self) -> bool:
        """Whether the next `step` wants the counts of its step."""
        return (self._step + 1) % self._record_every == 0

    def step(self, slot_counts: Any | None = None) -> StepEvent:
        """Advance by one engine step; all ranks call it at every step, idle or not.

        slot_counts: int [L, C] tokens each of this rank's slots took in this step, or None for a
        dummy or prefill step, which moves the counter but stays out of the window.

        Raises EplbError after `close`.
        """
        if self._closed:
            raise EplbError("this Balancer is closed: make a new one")
        self._step += 1
        if self._step % self._record_every == 0 and slot_counts is not None:
            self._window.add(slot_counts, self.local_experts())
        checked = self._check() if self._step % self._check_every == 0 else None
        decided, accepted = self._take_up()
        return StepEvent(checked, decided, accepted, self._commit())

    def close(self) -> None:
        """Stop the planning thread; the maps stay as they are."""
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _check(self) -> Evaluation | None:
        local = self._window.snapshot()
        # idle ranks may have recorded fewer blocks: agree on the shape before reducing the loads
        blocks = np.zeros(self._transport.size, dtype=np.int64)
        blocks[self._transport.rank] = local.shape[0]
        most = int(self._transport.all_reduce_sum(blocks).max())
        if most == 0:
            return None
        padded = np.zeros((most, *local.shape[1:]), dtype=np.int64)
        padded[most - local.shape[0] :] = local
        loads = self._transport.all_reduce_sum(padded)
        due = (self._step - self._first) % self._rearrange_every == 0 and self._step >= self._first
        if due and not self.rearranging and loads.any():
            future = None
            if self._transport.rank == 0:
                future = self._pool.submit(
                    plan,
                    loads,
                    self.num_gpus,
                    self.phy2log.shape[1],
                    self.phy2log.copy(),
                    fresh=self._fresh,
                    **self._plan_args,  # pyright: ignore[reportArgumentType]
                )
            self._pending = (self._step + self._plan_steps, future)
        return evaluate(loads, self.phy2log, self.num_gpus)

    def _take_up(self) -> tuple[Plan | None, bool | None]:
        if self._pending is None or self._step < self._pending[0]:
            return None, None
        future, self._pending = self._pending[1], None
        made = share_plan(future, self._transport, self.phy2log.shape, self._experts, self.num_gpus)
        accepted = self._gate.worth(made, self._rearrange_every)
        if accepted:
            self._fresh = False
            changed = np.flatnonzero((made.phy2log != self.phy2log).any(axis=1))
            self._queue = [(int(layer), made.phy2log[layer]) for layer in changed]
        return made, accepted

    def _commit(self) -> tuple[int, ...]:
        now, self._queue = (
            self._queue[: self._layers_per_step],
            self._queue[self._layers_per_step :],
        )
        for layer, target in now:
            if self._weights is not None and self._staging is not None and self._transport.size > 1:
                moves = movement(self.phy2log[layer], target, self.num_gpus, self._ranks_per_node)
                rearrange_layer(moves, self._weights[layer], self._staging, self._transport)
            elif self._weights is not None:
                self._permute_alone(layer, target)
            # maps change only after the weights of this layer arrived on all ranks
            self._transport.barrier()
            self.phy2log[layer] = target
            self._set_maps(layer)
            if self._on_commit is not None:
                self._on_commit(layer, self.phy2log[layer])
        return tuple(layer for layer, _ in now)

    def _permute_alone(self, layer: int, target: npt.NDArray[np.int32]) -> None:
        assert self._weights is not None
        first = {int(e): s for s, e in reversed(list(enumerate(self.phy2log[layer].tolist())))}
        source = np.array([first[int(e)] for e in target.tolist()])
        for w in self._weights[layer]:
            w[:] = w[source]

    def _set_maps(self, layer: int) -> None:
        log2phy, logcnt = maps_of(self.phy2log[layer : layer + 1], self._experts)
        self.log2phy[layer] = -1
        self.log2phy[layer, :, : log2phy.shape[2]] = log2phy[0]
        self.logcnt[layer] = logcnt[0]
