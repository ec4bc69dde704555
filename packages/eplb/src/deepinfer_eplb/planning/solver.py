"""Plans one layer: replicas, then places for them, then a search; holds the topology."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.planning import kernels_numpy
from deepinfer_eplb.planning.load_model import LoadModel, trust_old
from deepinfer_eplb.planning.narrow import peaks, place_by_peaks
from deepinfer_eplb.planning.replicas import adapt, by_peaks, by_power, exchange, keep_most

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

SEARCH_Q: Final = 6  # p = 64
PLACE_Q: Final = 4
REACH: Final = 2.0
NARROW_REACH: Final = 0.5
"""lambda of the objective in standard deviations of a rank's load: about where the maximum over
ranks lies. With few slots a rank the mean loads differ too much to be traded for variance."""
NARROW_SLOTS: Final = 3
PATIENCE: Final = 2
NARROW_PATIENCE: Final = 4
"""The search ends after this many ranks in a row, or this part of all ranks, that nothing helps:
where one heavy replica decides, the costliest ranks are often the hopeless ones."""
SCENARIOS: Final = 32
WIDER: Final = 1.3
SCENARIO_Q: Final = 5
SCENARIO_PRICE: Final = 1e-6
"""Scenarios of the search for few slots a rank on moving loads, their spread relative to the
window's blocks, its power, and the part of the objective that a swap must win."""
PEAK_SIGMAS: Final = 2.0
INTER_COST: Final = 8.0
"""Cost of an expert that arrives from another node, relative to one from the own node."""


def compiled() -> bool:
    """Whether numba is installed and planning uses the compiled kernels."""
    return kernels() is not kernels_numpy


def kernels() -> ModuleType:
    """The compiled kernels if numba is there, else the numpy ones."""
    try:
        from deepinfer_eplb.planning import kernels_numba
    except ImportError:
        return kernels_numpy
    return kernels_numba


@dataclass(slots=True)
class Solver:
    """nodes: number of nodes of num_gpus / nodes ranks each, for the cost of moving.

    price: fall of the imbalance that a changed slot must bring. replica_moves: let the search
    change replica counts too. swaps, moves: what the search did so far.
    """

    num_gpus: int
    num_slots: int
    nodes: int = 1
    price: float = 0.0
    replica_moves: bool = False
    swaps: int = 0
    moves: int = 0
    _kernels: Any = field(default_factory=lambda: kernels())

    def layer(self, model: LoadModel, layer: int, old: Int | None, budget: int) -> Int:
        """Placement int64 [S] of one layer; budget: slots that may change.

        old: [S] or None; or, from another topology, [G * its slots a rank], -1 where a rank held
        nothing: free slots are then filled beside the budget.
        """
        c, noise = model.components[layer], model.noise[layer]
        G, S = self.num_gpus, self.num_slots
        E = noise.size
        narrow = S // G <= NARROW_SLOTS
        # a whole placement: every slot in use and every expert somewhere
        same = old is not None and old.size == S and old.min() >= 0 and np.unique(old).size == E
        if old is not None and same:
            c = trust_old(c, noise, old, G)
        peak = c[0] + PEAK_SIGMAS * np.sqrt((c[1:] ** 2).sum(axis=0))
        slots = np.full((G, S // G), -1, dtype=np.int64)
        steps = None
        if (
            old is not None
            and narrow
            and same
            and model.moving
            and len(c) > 1
            and not self.replica_moves
        ):
            return self._narrow(model, layer, old, budget)
        if narrow:
            # without directions every step looks the same
            steps = np.maximum(c[0] + model.path @ c[1:], 0.1 * c[0]) if len(c) > 1 else c[:1]
        if old is not None:
            slots[:] = old.reshape(G, -1) if same else keep_most(peak, old.reshape(G, -1), S // G)
            held = np.bincount(slots[slots >= 0], minlength=E)
            n = exchange(peak, adapt(peak, held, S, G), budget, G)
        elif steps is not None:
            n = by_peaks(steps, S - E, G)
        else:
            n = by_power(peak, S - E, G)
        r, rn = kernels_numpy.replica_loads(c, noise, n)
        reach = NARROW_REACH if narrow else REACH
        # variance of a rank that holds its share of independent replicas
        kappa = _kappa(reach, float((((r[1:] ** 2).sum(axis=0) + rn) * n).sum()) / G)
        changed = 0
        if old is not None:
            changed = _drop_surplus(slots, n, r, rn, kappa)
        missing = n - np.bincount(slots[slots >= 0], minlength=E)
        todo = np.repeat(np.arange(E), missing)
        todo = todo[np.argsort(-r[0, todo], kind="stable")]
        self._kernels.place(slots, todo, r, rn, kappa, PLACE_Q)
        rival = None
        if steps is not None and old is None and model.moving:
            rival = place_by_peaks(todo, steps / n, G)
        load, own_noise = kernels_numpy.rank_state(slots, r, rn)
        kappa = _kappa(reach, float(np.median((load[1:] ** 2).sum(axis=0) + own_noise)))
        near = np.ones((G, E), dtype=np.bool_)
        if old is not None and self.nodes > 1:
            near = self._near(old, E)
        swaps, moves = self._kernels.search(
            slots, c, noise, n, kappa, SEARCH_Q, near, INTER_COST, max(budget - changed, 0),
            self.price, self._patience(narrow), narrow or self.replica_moves,
        )  # fmt: skip
        self.swaps += int(swaps)
        self.moves += int(moves) + changed
        if rival is not None and steps is not None and peaks(rival, steps) < peaks(slots, steps):
            return rival.ravel()
        return slots.ravel()

    def _narrow(self, model: LoadModel, layer: int, old: Int, budget: int) -> Int:
        """Swaps from a whole placement by the peaks of scenarios; replica counts stay.

        Moving loads were elsewhere before this window and will be again: the old placement knows
        of that, and the scenarios reach further than the window's own blocks.
        """
        c = model.components[layer]
        at = np.unique(np.linspace(0, len(model.path) - 1, SCENARIOS).astype(np.int64))
        steps = np.maximum(c[0] + WIDER * (model.path[at] @ c[1:]), 0.1 * c[0])
        slots = old.reshape(self.num_gpus, -1).copy()
        n = np.bincount(old, minlength=c.shape[1])
        self.swaps += self._kernels.search_scenarios(
            slots, np.ascontiguousarray((steps / n).T), SCENARIO_Q, budget, SCENARIO_PRICE,
            self.num_gpus // NARROW_PATIENCE,
        )  # fmt: skip
        return slots.ravel()

    def _patience(self, narrow: bool) -> int:
        if self.replica_moves:
            return self.num_gpus
        return max(PATIENCE, self.num_gpus // NARROW_PATIENCE) if narrow else PATIENCE

    def _near(self, old: Int, E: int) -> npt.NDArray[np.bool_]:
        """bool [G, E]; whether a rank's node holds an expert."""
        there = np.zeros((self.nodes, E), dtype=np.bool_)
        held = old >= 0
        there[np.repeat(np.arange(self.nodes), old.size // self.nodes)[held], old[held]] = True
        return np.repeat(there, self.num_gpus // self.nodes, axis=0)


def _kappa(reach: float, variance: float) -> float:
    return 0.5 * reach / float(np.sqrt(variance)) if variance > 0 else 0.0


def _drop_surplus(slots: Int, n: Int, r: Float, rn: Float, kappa: float) -> int:
    """Empty slots of experts that have more replicas than n, costliest holder first."""
    load, noise = kernels_numpy.rank_state(slots, r, rn)
    held = np.bincount(slots[slots >= 0], minlength=n.size)
    dropped = 0
    for e in np.flatnonzero(held > n).tolist():
        for _ in range(int(held[e] - n[e])):
            cost = kernels_numpy.base(load, noise, kappa)
            holders, columns = np.nonzero(slots == e)
            # a rank that holds it twice gives one back first: the second copy relieves nobody
            twice = np.bincount(holders, minlength=slots.shape[0])[holders] > 1
            at = int(np.where(twice == twice.any(), cost[holders], -1.0).argmax())
            slots[holders[at], columns[at]] = -1
            load[:, holders[at]] -= r[:, e]
            noise[holders[at]] -= rn[e]
            dropped += 1
    return dropped
