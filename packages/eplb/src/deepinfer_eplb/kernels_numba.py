"""Compiled twins of `kernels_numpy`: same signatures, same plans to the byte.

Inner loops run over ranks or slots, never over scenarios, so that each lane of a vector register
adds its scenarios in order, as numpy does. No fastmath: reassociation would change plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit  # pyright: ignore[reportMissingTypeStubs]

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
REFRESH = 8
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    jit: Any = njit
    try:
        return jit(cache=True)(function)
    except RuntimeError:  # neither the package nor the user's cache folder can be written
        return jit(function)


@_compiled
def _power(x: float, q: int) -> float:
    for _ in range(q):
        x = x * x
    return x


@_compiled
def _square(x: Float, q: int) -> None:
    for _ in range(q):
        for i in range(x.size):
            x[i] = x[i] * x[i]


@_compiled
def _score(x: Float, w: Float, e: int, m: float, q: int) -> float:
    total = w[0] * (m * _power(x[0, e] / m, q) - (m + 1.0) * _power(x[0, e] / (m + 1.0), q))
    for k in range(1, w.size):
        total += w[k] * (m * _power(x[k, e] / m, q) - (m + 1.0) * _power(x[k, e] / (m + 1.0), q))
    return total


@_compiled
def replicate(x: Float, w: Float, n: Int, extra: int, q: int) -> None:
    """See `kernels_numpy.replicate`."""
    E = n.size
    score = np.empty(E)
    for e in range(E):
        score[e] = _score(x, w, e, float(n[e]), q)
    for _ in range(extra):
        e = 0
        for i in range(1, E):
            if score[i] > score[e]:
                e = i
        n[e] += 1
        score[e] = _score(x, w, e, float(n[e]), q)


@_compiled
def rank_loads(slots: Int, r: Float) -> Float:
    """See `kernels_numpy.rank_loads`."""
    G, C = slots.shape
    load = np.zeros((r.shape[0], G))
    for c in range(C):
        for k in range(r.shape[0]):
            for g in range(G):
                if slots[g, c] >= 0:
                    load[k, g] += r[k, slots[g, c]]
    return load


@_compiled
def _rank_cost(load: Float, w: Float, g: int, q: int) -> float:
    total = w[0] * _power(load[0, g], q)
    for k in range(1, w.size):
        total += w[k] * _power(load[k, g], q)
    return total


@_compiled
def drop_surplus(slots: Int, n: Int, r: Float, w: Float, q: int) -> None:
    """See `kernels_numpy.drop_surplus`."""
    G, C = slots.shape
    load = rank_loads(slots, r)
    held = np.zeros(n.size, dtype=np.int64)
    for g in range(G):
        for c in range(C):
            held[slots[g, c]] += 1
    for e in range(n.size):
        for _ in range(max(held[e] - n[e], 0)):
            most = 0
            for g in range(G):
                most = max(most, _count(slots, g, e))
            best_g, best_cost = -1, -2.0
            for g in range(G):
                have = _count(slots, g, e)
                if have == 0:
                    continue
                cost = -1.0
                if have > 1 or most == 1:
                    cost = _rank_cost(load, w, g, q)
                if cost > best_cost:
                    best_g, best_cost = g, cost
            for c in range(C):
                if slots[best_g, c] == e:
                    slots[best_g, c] = -1
                    break
            for k in range(w.size):
                load[k, best_g] -= r[k, e]


@_compiled
def _count(slots: Int, g: int, e: int) -> int:
    found = 0
    for c in range(slots.shape[1]):
        if slots[g, c] == e:
            found += 1
    return found


@_compiled
def place(slots: Int, todo: Int, r: Float, w: Float, q: int) -> None:
    """See `kernels_numpy.place`."""
    G, C = slots.shape
    load = rank_loads(slots, r)
    rise, full, bare = np.empty(G), np.empty(G), np.empty(G)
    for t in range(todo.size):
        e = todo[t]
        rise[:] = 0.0
        for k in range(w.size):
            for g in range(G):
                full[g] = load[k, g] + r[k, e]
                bare[g] = load[k, g]
            _square(full, q)
            _square(bare, q)
            if k == 0:
                for g in range(G):
                    rise[g] = w[k] * (full[g] - bare[g])
            else:
                for g in range(G):
                    rise[g] += w[k] * (full[g] - bare[g])
        best_g, best_apart = -1, False
        for g in range(G):
            if _count(slots, g, -1) == 0:
                continue
            apart = _count(slots, g, e) == 0
            if best_g < 0 or (apart and not best_apart):
                best_g, best_apart = g, apart
            elif apart == best_apart and rise[g] < rise[best_g]:
                best_g = g
        for c in range(C):
            if slots[best_g, c] < 0:
                slots[best_g, c] = e
                break
        for k in range(w.size):
            load[k, best_g] += r[k, e]


@_compiled
def _busiest(load: Float) -> float:
    total = 0.0
    for k in range(load.shape[0]):
        peak = load[k, 0]
        for g in range(1, load.shape[1]):
            peak = max(peak, load[k, g])
        total += peak
    return total


@_compiled
def _linearise(weights: Float, w: Float, load: Float, q: int) -> None:
    """See `kernels_numpy._linearised`; the result goes to `weights`."""
    for k in range(w.size):
        total = _power(load[k, 0], q)
        for g in range(1, load.shape[1]):
            total += _power(load[k, g], q)
        root = total
        for _ in range(q):
            root = np.sqrt(root)
        weights[k] = w[k] * root / total


@_compiled
def _exchange_costs(
    total: Float,
    load: Float,
    slot_load: Float,
    slot_r: Float,
    w: Float,
    r_out: Float,
    a: int,
    q: int,
) -> None:
    """total[s] = cost of rank a and of the owner of slot s if they swapped."""
    S = total.size
    x, y = np.empty(S), np.empty(S)
    total[:] = 0.0
    for k in range(w.size):
        for s in range(S):
            d = r_out[k] - slot_r[k, s]
            x[s] = load[k, a] - d
            y[s] = slot_load[k, s] + d
        _square(x, q)
        _square(y, q)
        for s in range(S):
            total[s] += w[k] * (x[s] + y[s])


@_compiled
def improve(
    slots: Int, r: Float, w: Float, q: int, max_swaps: int, judge_r: Float, history: Float
) -> int:
    """See `kernels_numpy.improve`."""
    G, C = slots.shape
    K, S = w.size, G * C
    load, judge = rank_loads(slots, r), rank_loads(slots, judge_r)
    history[0] = _busiest(judge)
    cost, weights = np.empty(G), np.empty(K)
    slot_load, slot_r = np.empty((K, S)), np.empty((K, S))
    for k in range(K):
        for s in range(S):
            slot_load[k, s] = load[k, s // C]
            slot_r[k, s] = r[k, slots[s // C, s % C]]
    stale = np.zeros(G, dtype=np.bool_)
    total, r_out = np.empty(S), np.empty(K)
    blocked = np.empty(S, dtype=np.bool_)
    done, misses = 0, 0
    fresh = False
    while done < max_swaps and misses < 2:
        if not fresh and done % REFRESH == 0:
            _linearise(weights, w, load, q)
            for g in range(G):
                cost[g] = _rank_cost(load, weights, g, q)
        fresh = True
        a = -1
        for g in range(G):
            if not stale[g] and (a < 0 or cost[g] > cost[a]):
                a = g
        if a < 0:
            break
        for g in range(G):
            for c in range(C):
                blocked[g * C + c] = not cost[g] < cost[a] or _count(slots, a, slots[g, c]) > 0
        best, best_i, best_s = np.inf, -1, -1
        for i in range(C):
            out = slots[a, i]
            for k in range(K):
                r_out[k] = r[k, out]
            _exchange_costs(total, load, slot_load, slot_r, weights, r_out, a, q)
            for g in range(G):
                if not cost[g] < cost[a] or _count(slots, g, out) > 0:
                    continue
                for c in range(C):
                    s = g * C + c
                    if blocked[s]:
                        continue
                    gain = total[s] - (cost[a] + cost[g])
                    if gain < best:
                        best, best_i, best_s = gain, i, s
        if not best < -1e-12 * cost[a]:
            stale[a] = True
            misses += 1
            continue
        g, c = best_s // C, best_s % C
        out, into = slots[a, best_i], slots[g, c]
        slots[a, best_i], slots[g, c] = into, out
        for k in range(K):
            d = r[k, out] - r[k, into]
            load[k, a] -= d
            load[k, g] += d
            for c2 in range(C):
                slot_load[k, a * C + c2] = load[k, a]
                slot_load[k, g * C + c2] = load[k, g]
                slot_r[k, a * C + c2] = r[k, slots[a, c2]]
                slot_r[k, g * C + c2] = r[k, slots[g, c2]]
        for k in range(judge.shape[0]):
            d = judge_r[k, out] - judge_r[k, into]
            judge[k, a] -= d
            judge[k, g] += d
        cost[a] = _rank_cost(load, weights, a, q)
        cost[g] = _rank_cost(load, weights, g, q)
        stale[:] = False
        misses = 0
        done += 1
        fresh = False
        history[done] = _busiest(judge)
    return done
