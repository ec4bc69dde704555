"""Balancing while serving: record, check, plan in the background, commit layer by layer.

Every rank calls `step` once per engine step, busy or idle, and takes every decision from the same
all-reduced numbers at the same step, so that no collective is ever missed. Rank 0 plans and all
take over its plan: equal inputs do not make equal plans on machines that round differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_placement, check_count, check_topology
from deepinfer_eplb.errors import (
    CommitError,
    EplbError,
    LoadError,
    PlanError,
    ShapeError,
    TransportError,
)
from deepinfer_eplb.evaluation import Evaluation, evaluate
from deepinfer_eplb.online.gate import Gate
from deepinfer_eplb.online.plan_task import FAILED, READY, PlanTask, ask, in_thread, share
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.placement import initial_placement, maps_of
from deepinfer_eplb.planning.planner import Plan, plan, warm_up
from deepinfer_eplb.rearrange.layer import LayerChange, allocate_staging, host_rows
from deepinfer_eplb.rearrange.movement import movement
from deepinfer_eplb.rearrange.transport import Alone, Transport

log = logging.getLogger("deepinfer_eplb")


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What happened at a step.

    checked:   balance of the placement in force over the window, at check steps.
    decided:   the plan that was made, at the step it was taken up, and whether it was accepted.
    accepted:  None unless `decided` is set.
    committed: layers whose maps changed in this step.
    kept:      why there is no plan although one was due; the placement in force stays.
    """

    checked: Evaluation | None = None
    decided: Plan | None = None
    accepted: bool | None = None
    committed: tuple[int, ...] = ()
    kept: str | None = None


class _Maps(NamedTuple):
    """A layer's rows of the three maps; made before a switch, so that it only copies."""

    phy2log: npt.NDArray[np.int32]
    log2phy: npt.NDArray[np.int32]
    logcnt: npt.NDArray[np.int32]


@dataclass(slots=True)
class _Commit:
    """The layer in flight, or the last one: what `settle` needs to take the other side."""

    layer: int
    old: _Maps
    new: _Maps
    change: LayerChange


class Balancer:
    """Owner of the maps of one expert-parallel group; one instance a rank.

    weights: for each layer the list of arrays or host tensors [C, ...] of this rank's slots, moved
             in place; None when the caller moves weights itself (`on_commit`).
    initial: int [L, S], the placement in force at the start; None for `initial_placement`, which
             the first plan then replaces without regard to what moves.
    check_every, rearrange_every: steps; the first rearrangement comes after a quarter of it.
    record_every: steps between two recorded ones.
    plan_steps: steps a plan gets in the background before the ranks ask for it, and between two
             times of asking; nobody waits. It is given up when the next one is due.
    layers_per_step: layers whose movement is carried out in one step.
    on_commit: called with (layer, phy2log row) when a layer's weights and maps have switched here;
             if it raises on any rank, all go back (and it is called with the old row where it had
             been called with the new one).
    planner: makes the plans on rank 0, called like `plan`.
    background: starts a call beside the steps; default: a thread that nothing ever waits for.

    phy2log [L, S], log2phy [L, E, R+1] (-1 padded, the valid ones first) and logcnt [L, E] are
    int32 arrays updated in place, so that captured graphs may hold their addresses.

    generation counts the commits; `failure` is the error that ended the group's part in balancing:
    `step` raises it once and then only counts steps, maps and weights as they are, until `settle`.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        num_gpus: int,
        num_slots: int,
        *,
        transport: Transport | None = None,
        weights: Sequence[Sequence[Any]] | None = None,
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
        planner: Callable[..., Plan] = plan,
        background: Callable[[Callable[[], None]], Any] = in_thread,
    ) -> None:
        check_count("layers", layers)
        check_count("experts", experts)
        check_topology(experts, num_gpus, num_slots)
        self._transport: Transport = Alone() if transport is None else transport
        self._check_size(self._transport, num_gpus)
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
            self._take(layer, self._maps(self.phy2log[layer]))
        self._window = LoadWindow(layers, experts) if window is None else window
        self._gate = Gate() if gate is None else gate
        self._check_every, self._rearrange_every = check_every, rearrange_every
        self._record_every, self._plan_steps = record_every, plan_steps
        self._layers_per_step, self._ranks_per_node = layers_per_step, ranks_per_node
        if num_groups == num_nodes == 1 and ranks_per_node and num_gpus % ranks_per_node == 0:
            num_nodes = num_gpus // ranks_per_node  # a global plan that knows what a move costs
        self._plan_args = {"num_groups": num_groups, "num_nodes": num_nodes, "max_swaps": max_swaps}
        if planner is plan and self._transport.rank == 0:
            warm_up()
        self._on_commit, self._planner, self._background = on_commit, planner, background
        held = num_slots if self._transport.size == 1 else num_slots // num_gpus
        self._weights = None if weights is None else _checked_weights(weights, layers, held)
        self._staging = None if not self._weights else allocate_staging(self._weights[0])
        self._slots = slice(
            self._transport.rank * num_slots // num_gpus,
            (self._transport.rank + 1) * num_slots // num_gpus,
        )
        # the first plan comes after a quarter of the interval, on a check step
        self._step = 0
        self._closed = False
        self._first = max(check_every, rearrange_every // 4 // check_every * check_every)
        self._task: PlanTask | None = None
        self._due = self._given_up = 0  # steps at which to ask for the plan, and to stop asking
        # nothing is worth keeping of a placement that no load was ever asked about
        self._fresh = initial is None
        self._queue: list[tuple[int, npt.NDArray[np.int32]]] = []
        self._last: _Commit | None = None
        self._dropped = 0
        self.generation = 0
        self.failure: EplbError | None = None

    @property
    def window(self) -> LoadWindow:
        """Recorded loads, in logical experts: a Balancer of another topology may go on with it."""
        return self._window

    @property
    def rearranging(self) -> bool:
        """Whether a plan is being made or carried out."""
        return self._due > 0 or bool(self._queue)

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

        Raises CommitError on every rank if one could not switch a layer (the rest of that plan is
        given up, later steps go on), TransportError once if a peer was lost (see `failure`), and
        EplbError after `close`. Weights and maps agree in every case. What goes wrong in planning
        is logged and leaves the placement in force.
        """
        if self._closed:
            raise EplbError("this Balancer is closed: make a new one")
        self._step += 1
        if self._step % self._record_every == 0 and slot_counts is not None:
            self._record(slot_counts)
        if self.failure is not None:
            return StepEvent()
        try:
            checked = self._check() if self._step % self._check_every == 0 else None
            decided, accepted, kept = self._take_up()
            return StepEvent(checked, decided, accepted, self._commit(), kept)
        except CommitError:
            self._queue = []
            raise
        except EplbError as e:
            self._give_up(e)
            raise
        except Exception as e:
            error = TransportError(f"this rank cannot take part any more: {e!r}")
            self._give_up(error)
            raise error from e

    def _give_up(self, error: EplbError) -> None:
        self.failure = error
        self._queue, self._task, self._due = [], None, 0
        log.error("balancing ends at step %d, the old maps in force: %s", self._step, error)

    def settle(self, transport: Transport) -> int:
        """After a lost peer, over the survivors' new group: agree on the layer that was in flight.

        Collective. A rank that did not see the last commit end takes it if another one did; its
        weights lie ready. Returns the number of ranks that did so. With as many ranks as before
        (the peer came back) balancing goes on; else plan for the new number of ranks and make a new
        Balancer of `phy2log`. Raises EplbError where a rank cannot follow.
        """
        mine = np.zeros((2, transport.size), dtype=np.int64)
        mine[:, transport.rank] = self.generation, self._step
        reached, steps = transport.all_reduce_sum(mine)
        newest = int(reached.max())
        behind = newest - self.generation
        last = self._last
        able = behind == 0 or (behind == 1 and last is not None and last.change.staged)
        unable = int(transport.all_reduce_sum(np.array([not able], dtype=np.int64))[0])
        if unable:
            raise EplbError(
                f"{unable} ranks are behind generation {newest} and hold no copy of what changed: "
                "load their experts anew"
            )
        if behind and last is not None:
            last.change.switch()
            self._apply(last.layer, last.new)
            self.generation = newest
        self._queue, self._task, self._due = [], None, 0
        self._step = int(steps.max())  # all ranks check and plan at the same steps again
        if transport.size == self.num_gpus:
            self._transport, self.failure = transport, None
        return int((reached < newest).sum())

    def close(self) -> None:
        """Stop balancing; the maps stay as they are. A plan in the making is not waited for."""
        self._closed = True
        self._task, self._due = None, 0

    @staticmethod
    def _check_size(transport: Transport, num_gpus: int) -> None:
        if transport.size not in (1, num_gpus):
            raise ShapeError(f"the transport has {transport.size} ranks, the placement {num_gpus}")

    def _record(self, slot_counts: Any) -> None:
        try:
            self._window.add(slot_counts, self.local_experts())
        except LoadError as e:
            # one rank's broken counter must not keep it from the collective the others are in
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    "step %d: its counts, and others like them, are dropped: %s", self._step, e
                )

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
            if self._transport.rank == 0:
                self._task = self._begin(loads)
            self._due = self._step + self._plan_steps
            self._given_up = self._step + self._rearrange_every
        return evaluate(loads, self.phy2log, self.num_gpus)

    def _begin(self, loads: npt.NDArray[np.int64]) -> PlanTask:
        old, fresh = self.phy2log.copy(), self._fresh
        gpus, slots = self.num_gpus, old.shape[1]

        def make() -> tuple[Plan, bool]:
            made = self._planner(loads, gpus, slots, old, fresh=fresh, **self._plan_args)
            if made.phy2log.shape != old.shape:
                raise PlanError(f"the planner made {made.phy2log.shape}, not {old.shape}")
            maps_of(made.phy2log, self._experts)
            return made, bool(self._gate.worth(made, self._rearrange_every))

        return PlanTask(make, self._background)

    def _take_up(self) -> tuple[Plan | None, bool | None, str | None]:
        if self._due == 0 or self._step < self._due:
            return None, None, None
        task, state = self._task, ask(self._task, self._transport)
        if state not in (READY, FAILED):
            if self._step < self._given_up:
                self._due = self._step + max(1, self._plan_steps)
                return None, None, None
            kept = f"no plan after {self._rearrange_every} steps: given up"
        elif state == FAILED:
            kept = "the planner failed on rank 0"
            if task is not None:
                kept = f"the planner failed: {task.error!r}"
        else:
            made, accepted = share(
                task, self._transport, self.phy2log.shape, self._experts, self.num_gpus
            )
            self._task, self._due = None, 0
            if accepted:
                self._fresh = False
                changed = np.flatnonzero((made.phy2log != self.phy2log).any(axis=1))
                self._queue = [(int(layer), made.phy2log[layer]) for layer in changed]
            return made, accepted, None
        self._task, self._due = None, 0
        if task is not None:
            log.warning("step %d: %s; the placement in force stays", self._step, kept)
        return None, None, kept

    def _commit(self) -> tuple[int, ...]:
        now = self._queue[: self._layers_per_step]
        for layer, target in now:
            change = self._change(layer, target)
            last = _Commit(layer, self._maps(self.phy2log[layer]), self._maps(target), change)
            self._last = last
            try:
                self._run(last)
            except TransportError:
                if not change.staged:
                    self._staging = None  # a late message may still be written there
                raise
            self.generation += 1
            self._queue = self._queue[1:]
        return tuple(layer for layer, _ in now)

    def _change(self, layer: int, target: npt.NDArray[np.int32]) -> LayerChange:
        """The movement of a layer; without weights of ours it still votes and waits for all."""
        gpus = self.num_gpus if self._transport.size > 1 else 1
        moves = movement(self.phy2log[layer], target, gpus, self._ranks_per_node)
        if self._weights is None:
            moves = moves.without_weights()
            return LayerChange(moves, [], [], self._transport)
        if self._staging is None:
            self._staging = allocate_staging(self._weights[layer])
        return LayerChange(moves, self._weights[layer], self._staging, self._transport)

    def _run(self, last: _Commit) -> None:
        called = False

        def apply() -> None:
            nonlocal called
            called = True
            self._apply(last.layer, last.new)

        def revert() -> None:
            if called:
                self._revert(last.layer, last.old)

        last.change.run(apply, revert)

    def _apply(self, layer: int, maps: _Maps) -> None:
        self._take(layer, maps)
        if self._on_commit is not None:
            self._on_commit(layer, self.phy2log[layer])

    def _revert(self, layer: int, maps: _Maps) -> None:
        self._take(layer, maps)
        if self._on_commit is not None:
            try:
                self._on_commit(layer, self.phy2log[layer])
            except Exception as e:
                log.warning("on_commit failed for the old row of layer %d: %r", layer, e)

    def _take(self, layer: int, maps: _Maps) -> None:
        self.phy2log[layer], self.log2phy[layer], self.logcnt[layer] = maps

    def _maps(self, row: npt.NDArray[np.int32]) -> _Maps:
        log2phy, logcnt = maps_of(row[None], self._experts)
        padded = np.full(self.log2phy.shape[1:], -1, dtype=np.int32)
        padded[:, : log2phy.shape[2]] = log2phy[0]
        return _Maps(row.copy(), padded, logcnt[0])


def _checked_weights(
    weights: Sequence[Sequence[Any]], layers: int, held: int
) -> list[list[npt.NDArray[Any]]]:
    rows = [host_rows(layer) for layer in weights]
    sizes = [{w.shape[0] if w.ndim else 0 for w in layer} for layer in rows]
    if sizes != [{held}] * layers:
        raise ShapeError(
            f"weights wants for each of {layers} layers arrays of {held} slots, got {sizes}"
        )
    kinds = [[(w.shape, w.dtype) for w in layer] for layer in rows]
    for layer, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ShapeError(
                f"weights wants the same arrays in every layer: layer 0 has {kinds[0]}, layer "
                f"{layer} has {kind}"
            )
    for layer in rows:
        if not all(w.flags.writeable for w in layer):
            raise ShapeError("weights wants arrays that can be written: one is read-only")
    return rows
