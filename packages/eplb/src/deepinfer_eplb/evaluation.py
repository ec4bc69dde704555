"""How well a placement balances given steps, beside the floor that counting noise sets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads, as_placement, check_topology, replica_counts
from deepinfer_eplb.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Evaluation:
    """B:         sum over steps and layers of the busiest rank / the same of the mean rank.
    per_layer: float64 [L]; the same by layer.
    floor:     expected B of a perfectly balanced placement at this batch size, from counting
               noise alone: 1 + z_G / sqrt(M).
    M:         mean assignments per rank, layer and step.
    """

    B: float
    per_layer: npt.NDArray[np.float64]
    floor: float
    M: float

    @property
    def excess(self) -> float:
        """B above the floor: what a better placement could still win, about."""
        return self.B - self.floor


def rank_shares(
    phy2log: npt.NDArray[np.int32], num_experts: int, num_gpus: int
) -> npt.NDArray[np.float64]:
    """float64 [L, E, G]; share of each expert's load that lands on each rank, split evenly."""
    layers, slots = phy2log.shape
    counts = replica_counts(phy2log, num_experts)
    shares = np.zeros((layers, num_experts, num_gpus))
    layer = np.arange(layers)[:, None]
    rank = np.arange(slots)[None, :] // (slots // num_gpus)
    np.add.at(shares, (layer, phy2log, rank), 1.0 / counts[layer, phy2log])
    return shares


def rank_loads(loads: npt.NDArray[np.float64], shares: npt.NDArray[np.float64]) -> Any:
    """float64 [L, T, G] from loads [T, L, E] and shares [L, E, G]."""
    return np.matmul(loads.transpose(1, 0, 2), shares)


def imbalance(load_ltg: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
    """(B, B by layer) from rank loads [L, T, G]; layers without load count as balanced."""
    busiest = load_ltg.max(axis=2).sum(axis=1)
    mean = load_ltg.mean(axis=2).sum(axis=1)
    total = float(mean.sum())
    per_layer = np.divide(busiest, mean, out=np.ones_like(mean), where=mean > 0)
    return (float(busiest.sum()) / total if total > 0 else 1.0), per_layer


def evaluate(loads: Any, phy2log: Any, num_gpus: int, dispatch: str = "even") -> Evaluation:
    """Judge a placement. Use steps the plan has not seen: in-window figures flatter.

    loads:    [T, L, E] assignments of each logical expert (counts or expectations).
    phy2log:  int [L, S], slot s lies on rank s // (S // num_gpus).
    dispatch: "even" splits each expert's load evenly over its replicas; "waterfill" chooses the
              split of every step so that the busiest rank gets least (see `dispatch.waterfill`).

    Raises ShapeError for arguments that do not fit.
    """
    v = as_loads(loads, "loads")
    T, L, E = v.shape
    placement = as_placement(phy2log, E)
    if placement.shape[0] != L:
        raise ShapeError(f"evaluate wants phy2log for {L} layers, got {placement.shape[0]}")
    check_topology(E, num_gpus, placement.shape[1])
    if dispatch == "even":
        load_ltg = rank_loads(v, rank_shares(placement, E, num_gpus))
    elif dispatch == "waterfill":
        from deepinfer_eplb.dispatch import waterfill_loads

        load_ltg = waterfill_loads(v, placement, num_gpus)
    else:
        raise ShapeError(f"dispatch is 'even' or 'waterfill', got {dispatch!r}")
    B, per_layer = imbalance(load_ltg)
    M = float(v.sum()) / (T * L * num_gpus)
    return Evaluation(B=B, per_layer=per_layer, floor=noise_floor(num_gpus, M), M=M)


def noise_floor(num_gpus: int, M: float) -> float:
    """1 + z_G / sqrt(M): expected busiest of G equal Poisson ranks over their mean."""
    return 1.0 + expected_max_normal(num_gpus) / math.sqrt(M) if M > 0 else 1.0


@lru_cache(maxsize=256)
def expected_max_normal(n: int) -> float:
    """Mean of the largest of n standard normals (z_64 = 2.34, z_8 = 1.42)."""
    x = np.linspace(-9.0, 9.0, 7201)
    cdf = np.array([0.5 * (1.0 + math.erf(v / math.sqrt(2.0))) for v in x])
    # E[max] = integral of 1 - F^n over the positives minus integral of F^n over the negatives
    above = np.where(x >= 0, 1.0 - cdf**n, -(cdf**n))
    return float(np.sum(0.5 * (above[1:] + above[:-1]) * np.diff(x)))
