"""The four steps of planning one layer, in numpy. `kernels_numba` holds their compiled twins.

Both give the same plan to the byte: sums over scenarios run in scenario order, powers are repeated
squarings, ties go to the lowest index. Objective: F = sum_k w_k sum_g load[k, g] ** p, p = 2 ** q.

Shapes: x, r float64 [K, E] load of an expert, and of one replica of it; w float64 [K];
slots int64 [G, C] expert ids or -1; load float64 [K, G]; n int64 [E].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
REFRESH = 8
"""Swaps between two updates of the scenario weights."""


def power(x: Float, q: int) -> Float:
    """x ** (2 ** q) by repeated squaring."""
    for _ in range(q):
        x = x * x
    return x


def _weighted(w: Float, terms: Float) -> Float:
    """sum_k w_k terms[k], strictly in the order of k (numpy's own sum may pair terms)."""
    total = w[0] * terms[0]
    for k in range(1, w.size):
        total = total + w[k] * terms[k]
    return total


def replicate(x: Float, w: Float, n: Int, extra: int, q: int) -> None:
    """Add `extra` replicas to n, each where it lowers sum_k w_k n (x/n)**p most."""
    m = n.astype(np.float64)
    score = _weighted(w, m * power(x / m, q) - (m + 1.0) * power(x / (m + 1.0), q))
    for _ in range(extra):
        e = int(score.argmax())
        n[e] += 1
        m_e = float(n[e])
        terms = m_e * power(x[:, e] / m_e, q) - (m_e + 1.0) * power(x[:, e] / (m_e + 1.0), q)
        score[e] = _weighted(w, terms[:, None])[0]


def rank_loads(slots: Int, r: Float) -> Float:
    """float64 [K, G]; loads of ranks, slot by slot in order."""
    load = np.zeros((r.shape[0], slots.shape[0]))
    for c in range(slots.shape[1]):
        held = slots[:, c]
        load += np.where(held >= 0, r[:, np.maximum(held, 0)], 0.0)
    return load


def drop_surplus(slots: Int, n: Int, r: Float, w: Float, q: int) -> None:
    """Empty slots of experts that have more replicas than n, costliest holder first."""
    load = rank_loads(slots, r)
    held = np.bincount(slots.ravel(), minlength=n.size)
    for e in np.flatnonzero(held > n).tolist():
        for _ in range(int(held[e] - n[e])):
            cost = _weighted(w, power(load, q))
            holders, columns = np.nonzero(slots == e)
            # a rank that holds it twice gives one back first: the second copy relieves nobody
            twice = np.bincount(holders, minlength=slots.shape[0])[holders] > 1
            at = int(np.where(twice == twice.any(), cost[holders], -1.0).argmax())
            slots[holders[at], columns[at]] = -1
            load[:, holders[at]] -= r[:, e]


def place(slots: Int, todo: Int, r: Float, w: Float, q: int) -> None:
    """Fill empty slots with `todo` in order, each where F rises least.

    A rank that already holds the expert is used only when no other has an empty slot.
    """
    load = rank_loads(slots, r)
    for e in todo.tolist():
        free = (slots < 0).any(axis=1)
        apart = free & ~(slots == e).any(axis=1)
        rise = _weighted(w, power(load + r[:, e][:, None], q) - power(load, q))
        g = int(np.where(apart if apart.any() else free, rise, np.inf).argmin())
        c = int((slots[g] < 0).argmax())
        slots[g, c] = e
        load[:, g] += r[:, e]


def improve(
    slots: Int, r: Float, w: Float, q: int, max_swaps: int, judge_r: Float, history: Float
) -> int:
    """Swap experts between the costliest rank and others, best exact improvement first.

    A rank without an improving partner is set aside; two such in a row end the search.
    judge_r: float64 [J, E], replica loads of scenarios that are not optimised; history[i] becomes
    sum_j max_g of them after i swaps. Returns the number of swaps made.
    """
    G, C = slots.shape
    load, judge = rank_loads(slots, r), rank_loads(slots, judge_r)
    history[0] = _busiest(judge)
    stale = np.zeros(G, dtype=np.bool_)
    base, cost = w, np.empty(G)
    done = misses = 0
    fresh = False
    while done < max_swaps and misses < 2:
        if not fresh and done % REFRESH == 0:
            w = _linearised(base, load, q)
            cost = _weighted(w, power(load, q))
        fresh = True
        if stale.all():
            break
        a = int(np.where(stale, -1.0, cost).argmax())
        flat = slots.ravel()
        owner = np.repeat(np.arange(G), C)
        mine = slots[a]
        # valid[i, s]: slot s is on a cheaper rank, neither rank would hold an expert twice
        holds = (slots[None, :, :] == mine[:, None, None]).any(axis=2)
        valid = (cost < cost[a])[owner][None, :] & ~holds[:, owner]
        valid &= ~(flat[:, None] == mine[None, :]).any(axis=1)[None, :]
        total = np.zeros((C, G * C))
        for k in range(w.size):
            d = r[k, mine][:, None] - r[k, flat][None, :]
            total += w[k] * (power(load[k, a] - d, q) + power(load[k, owner][None, :] + d, q))
        gain = np.where(valid, total - (cost[a] + cost[owner])[None, :], np.inf)
        best = int(gain.argmin())
        i, s = divmod(best, G * C)
        if not gain[i, s] < -1e-12 * cost[a]:
            stale[a] = True
            misses += 1
            continue
        g, j = divmod(s, C)
        out, into = int(slots[a, i]), int(slots[g, j])
        slots[a, i], slots[g, j] = into, out
        for loads, each in ((load, r), (judge, judge_r)):
            d_k = each[:, out] - each[:, into]
            loads[:, a] -= d_k
            loads[:, g] += d_k
        pair = [a, g]
        cost[pair] = _weighted(w, power(load[:, pair], q))
        stale[:] = False
        misses = 0
        done += 1
        fresh = False
        history[done] = _busiest(judge)
    return done


def _linearised(w: Float, load: Float, q: int) -> Float:
    """Weights that make F follow sum_k w_k (sum_g load ** p) ** (1 / p) near the present loads.

    Without them the scenario with the largest imbalance outweighs all others by its p-th power,
    while every step costs time in proportion to its own busiest rank.
    """
    total = np.add.accumulate(power(load, q), axis=1)[:, -1]
    root = total
    for _ in range(q):
        root = np.sqrt(root)
    return w * root / total


def _busiest(load: Float) -> float:
    total = 0.0
    for peak in load.max(axis=1).tolist() if load.size else []:
        total += peak
    return total
