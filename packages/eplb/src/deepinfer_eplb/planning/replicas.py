"""How many replicas each expert of a layer gets."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

POWER: Final = 8.0
CHURN: Final = 16.0
"""A replica changes owner only if that lowers the objective this many times more than taking it
away raises it: with power 8, when per-replica loads differ by more than about 40%."""


def by_power(x: Float, extra: int, ranks: int) -> Int:
    """One replica each and `extra` more, each where it lowers sum_e n (x/n)**p most. int64 [E].

    x: [E] load of an expert. More replicas than ranks relieve nobody: such come last.
    """
    n = np.ones(x.size)
    score = _gain(x, n)
    for _ in range(extra):
        e = int(np.where((n < ranks) == (n < ranks).any(), score, -np.inf).argmax())
        n[e] += 1.0
        score[e] = _gain(x[e], n[e])
    return n.astype(np.int64)


def by_peaks(steps: Float, extra: int, ranks: int) -> Int:
    """As `by_power`, each where the sum over steps of the largest replica falls most.

    steps: [K, E]. For ranks of so few slots that their heaviest replica decides.
    """
    n = np.ones(steps.shape[1], dtype=np.int64)
    rows = np.arange(steps.shape[0])
    share = steps / n
    for _ in range(extra):
        first = share.argmax(axis=1)
        top = share[rows, first]
        share[rows, first] = -np.inf
        second = share.max(axis=1)
        share[rows, first] = top
        relieved = np.maximum(second, steps[rows, first] / (n[first] + 1))
        saved = np.bincount(first, weights=top - relieved, minlength=n.size)
        saved = np.where((n < ranks) == (n < ranks).any(), saved, -np.inf)
        # equal loads tie at nothing saved: the heaviest replicas in sum go first then
        e = int(np.where(saved == saved.max(), share.sum(axis=0), -np.inf).argmax())
        n[e] += 1
        share[:, e] = steps[:, e] / n[e]
    return n


def exchange(x: Float, n: Int, most: int, ranks: int) -> Int:
    """Replica counts that differ from n only where it pays for a move, in at most `most` moves."""
    m = n.astype(np.float64)
    for _ in range(most):
        gain = np.where(m < ranks, _gain(x, m), 0.0)
        fewer = np.maximum(m - 1.0, 1.0)
        loss = np.where(m > 1.0, _gain(x, fewer), np.inf)
        e, f = int(gain.argmax()), int(loss.argmin())
        if e == f or not gain[e] > CHURN * loss[f]:
            break
        m[e] += 1.0
        m[f] -= 1.0
    return m.astype(np.int64)


def adapt(x: Float, held: Int, slots: int, ranks: int) -> Int:
    """Replica counts for `slots` slots in all, from those held in another topology.

    Every expert keeps at least one; slots gained go where they relieve most, slots lost are taken
    where that loads least.
    """
    m = np.maximum(held, 1).astype(np.float64)
    while m.sum() < slots:
        score = np.where((m < ranks) == (m < ranks).any(), _gain(x, m), -np.inf)
        m[int(score.argmax())] += 1.0
    while m.sum() > slots:
        m[int(np.where(m > 1.0, _gain(x, np.maximum(m - 1.0, 1.0)), np.inf).argmin())] -= 1.0
    return m.astype(np.int64)


def keep_most(x: Float, slots: Int, per_rank: int) -> Int:
    """Slots [G, C] cut or widened to `per_rank` a rank: [G, per_rank], -1 where a slot is free.

    Given up are second copies on a rank first, then what other ranks hold too and loads least.
    """
    G, C = slots.shape
    out = np.full((G, per_rank), -1, dtype=np.int64)
    n = np.bincount(slots[slots >= 0], minlength=x.size).astype(np.float64)
    for g in range(G):
        mine = [e for e in slots[g].tolist() if e >= 0]
        while len(mine) > per_rank:
            loss = [(mine.count(e) < 2, n[e] < 2, float(x[e] / n[e]), e) for e in mine]
            gone = min(loss)[3]
            mine.remove(gone)
            n[gone] -= 1.0
        if per_rank >= C:
            out[g, :C] = slots[g]
        else:
            out[g, : len(mine)] = mine
    return out


def _gain(x: Float, n: Float) -> Float:
    """How much one more replica lowers n (x/n)**p."""
    return n * (x / n) ** POWER - (n + 1.0) * (x / (n + 1.0)) ** POWER
