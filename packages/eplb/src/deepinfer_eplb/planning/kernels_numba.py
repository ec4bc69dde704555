"""Compiled twins of `kernels_numpy`: same signatures, same plans to the byte.

Inner loops run over ranks or slots, never over components, so that each lane of a vector register
adds its components in order, as numpy does. No fastmath: reassociation would change plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit  # pyright: ignore[reportMissingTypeStubs]

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
F = TypeVar("F", bound=Callable[..., Any])


def _compiled(function: F) -> F:
    jit: Any = njit
    # without the lock a search of milliseconds stops no thread that serves
    try:
        return jit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither the package nor the user's cache folder can be written
        return jit(nogil=True)(function)


@_compiled
def _power(x: float, q: int) -> float:
    for _ in range(q):
        x = x * x
    return x


@_compiled
def _powers(x: Float, q: int) -> None:
    for _ in range(q):
        for i in range(x.size):
            x[i] = x[i] * x[i]


@_compiled
def _holds(slots: Int, g: int, e: int) -> bool:
    found = False
    for held in slots[g]:
        found = found or held == e
    return found


@_compiled
def _rank_state(slots: Int, r: Float, rn: Float, load: Float, noise: Float, g: int) -> None:
    """Load [J, G] and noise [G] of rank g anew, slot by slot in order."""
    J = load.shape[0]
    noise[g] = 0.0
    for j in range(J):
        load[j, g] = 0.0
    for e in slots[g]:
        if e >= 0:
            noise[g] += rn[e]
            for j in range(J):
                load[j, g] += r[j, e]


@_compiled
def _base(load: Float, noise: Float, kappa: float, g: int) -> float:
    v = noise[g]
    for j in range(1, load.shape[0]):
        v += load[j, g] * load[j, g]
    return load[0, g] + kappa * v


@_compiled
def place(slots: Int, todo: Int, r: Float, rn: Float, kappa: float, q: int) -> None:
    """See `kernels_numpy.place`."""
    G, C = slots.shape
    J = r.shape[0]
    load, noise = np.empty((J, G)), np.empty(G)
    for g in range(G):
        _rank_state(slots, r, rn, load, noise, g)
    after, now = np.empty(G), np.empty(G)
    for e in todo:
        for g in range(G):
            after[g] = noise[g] + rn[e]
            now[g] = _base(load, noise, kappa, g)
        for j in range(1, J):
            for g in range(G):
                x = load[j, g] + r[j, e]
                after[g] += x * x
        for g in range(G):
            after[g] = (load[0, g] + r[0, e]) + kappa * after[g]
        _powers(after, q)
        _powers(now, q)
        best_g, best_apart = -1, False
        for g in range(G):
            if not _holds(slots, g, -1):
                continue
            apart = not _holds(slots, g, e)
            if best_g < 0 or (apart and not best_apart):
                best_g, best_apart = g, apart
            elif apart == best_apart and after[g] - now[g] < after[best_g] - now[best_g]:
                best_g = g
        for column in range(C):
            if slots[best_g, column] < 0:
                slots[best_g, column] = e
                break
        for j in range(J):
            load[j, best_g] += r[j, e]
        noise[best_g] += rn[e]


@_compiled
def _one_replica(c: Float, noise: Float, n: Int, r: Float, rn: Float, e: int) -> None:
    m = float(n[e])
    for j in range(c.shape[0]):
        r[j, e] = c[j, e] / m
    rn[e] = noise[e] / (m * m)


@_compiled
def _swap_costs(
    ours: Float, theirs: Float, load: Float, noise: Float, r_s: Float, rn_s: Float, rest: Float,
    rest_noise: Float, r: Float, rn: Float, kappa: float, q: int, scale: float, a: int, o: int,
) -> None:  # fmt: skip
    """Costs of rank a and of the owner of slot s if they swapped expert o for the one in s.

    r_s [J, S], rn_s [S]: expert in each slot; rest, rest_noise: its rank's load without it.
    """
    S = ours.size
    kept = noise[a] - rn[o]
    for s in range(S):
        ours[s] = kept + rn_s[s]
        theirs[s] = rest_noise[s] + rn[o]
    for j in range(1, r.shape[0]):
        without, out = load[j, a] - r[j, o], r[j, o]
        for s in range(S):
            x = without + r_s[j, s]
            y = rest[j, s] + out
            ours[s] += x * x
            theirs[s] += y * y
    without, out = load[0, a] - r[0, o], r[0, o]
    for s in range(S):
        ours[s] = ((without + r_s[0, s]) + kappa * ours[s]) * scale
        theirs[s] = ((rest[0, s] + out) + kappa * theirs[s]) * scale
    _powers(ours, q)
    _powers(theirs, q)


@_compiled
def _fill_slots(
    slots: Int, r: Float, rn: Float, load: Float, noise: Float, r_s: Float, rn_s: Float,
    rest: Float, rest_noise: Float, g: int,
) -> None:  # fmt: skip
    C = slots.shape[1]
    for column in range(C):
        e, s = slots[g, column], g * C + column
        rn_s[s] = rn[e]
        rest_noise[s] = noise[g] - rn[e]
        for j in range(r.shape[0]):
            r_s[j, s] = r[j, e]
            rest[j, s] = load[j, g] - r[j, e]


@_compiled
def search(
    slots: Int, c: Float, noise: Float, n: Int, kappa: float, q: int, near: Bool, inter: float,
    budget: int, price: float, misses: int, replica_moves: bool,
) -> tuple[int, int]:  # fmt: skip
    """See `kernels_numpy.search`."""
    G, C = slots.shape
    J, E = c.shape
    S = G * C
    r, rn = np.empty((J, E)), np.empty(E)
    for e in range(E):
        _one_replica(c, noise, n, r, rn, e)
    load, own_noise, cost = np.empty((J, G)), np.empty(G), np.empty(G)
    r_s, rn_s, rest, rest_noise = np.empty((J, S)), np.empty(S), np.empty((J, S)), np.empty(S)
    ours, theirs = np.empty(S), np.empty(S)
    touched = np.ones(G, dtype=np.bool_)
    stale = np.zeros(G, dtype=np.bool_)
    blocked = np.empty(S, dtype=np.bool_)
    top = 0.0
    for g in range(G):
        _rank_state(slots, r, rn, load, own_noise, g)
        top = max(top, _base(load, own_noise, kappa, g))
    scale = 1.0 / top
    used, swaps, moves, missed, total = 0, 0, 0, 0, 0.0
    while used < budget and missed < misses:
        total = 0.0
        for g in range(G):
            if touched[g]:
                _rank_state(slots, r, rn, load, own_noise, g)
                cost[g] = _power(_base(load, own_noise, kappa, g) * scale, q)
                _fill_slots(slots, r, rn, load, own_noise, r_s, rn_s, rest, rest_noise, g)
            total += cost[g]
        touched[:] = False
        a = -1
        for g in range(G):
            if not stale[g] and (a < 0 or cost[g] > cost[a]):
                a = g
        if a < 0:
            break
        limit = price * float(2**q) * total + 1e-12 * cost[a]
        best, kind, best_x, best_y = 0.0, 0, 0, 0
        if used + 2 <= budget:
            for g in range(G):
                for column in range(C):
                    blocked[g * C + column] = not cost[g] < cost[a] or _holds(
                        slots, a, slots[g, column]
                    )
            for i in range(C):
                o = slots[a, i]
                _swap_costs(
                    ours, theirs, load, own_noise, r_s, rn_s, rest, rest_noise, r, rn, kappa, q,
                    scale, a, o,
                )  # fmt: skip
                for g in range(G):
                    if not cost[g] < cost[a] or _holds(slots, g, o):
                        continue
                    to_g = 1.0 if near[g, o] else inter
                    for column in range(C):
                        s = g * C + column
                        if blocked[s]:
                            continue
                        gain = (ours[s] + theirs[s]) - (cost[a] + cost[g])
                        if not gain < -2.0 * limit:
                            continue
                        score = gain / (to_g + (1.0 if near[a, slots[g, column]] else inter))
                        if score < best:
                            best, kind, best_x, best_y = score, 1, i, s
        if replica_moves:
            score, x, y = _replica_move(
                slots, c, noise, n, r, rn, load, own_noise, cost, kappa, q, scale, a, limit, near,
                inter,
            )  # fmt: skip
            if score < best:
                best, kind, best_x, best_y = score, 2, x, y
        if kind == 0:
            stale[a] = True
            missed += 1
            continue
        if kind == 1:
            g, column = best_y // C, best_y % C
            out = slots[a, best_x]
            slots[a, best_x] = slots[g, column]
            slots[g, column] = out
            touched[a] = touched[g] = True
        else:
            g, column, e = best_x // C, best_x % C, best_y
            f = int(slots[g, column])
            slots[g, column] = e
            n[f] -= 1
            n[e] += 1
            _one_replica(c, noise, n, r, rn, f)
            _one_replica(c, noise, n, r, rn, e)
            touched[:] = True
            after = 0.0
            for h in range(G):
                _rank_state(slots, r, rn, load, own_noise, h)
                after += _power(_base(load, own_noise, kappa, h) * scale, q)
            if not after < total - limit:
                slots[g, column] = f
                n[f] += 1
                n[e] -= 1
                _one_replica(c, noise, n, r, rn, f)
                _one_replica(c, noise, n, r, rn, e)
                stale[a] = True
                missed += 1
                continue
        used += 3 - kind
        if kind == 1:
            swaps += 1
        else:
            moves += 1
        stale[:] = False
        missed = 0
    return swaps, moves


@_compiled
def _changed(
    load: Float, rest_noise: float, c: Float, noise: Float, r: Float, f: int, sign: float,
    share: float, kappa: float, q: int, scale: float, g: int,
) -> float:  # fmt: skip
    """Cost of rank g with its replica of f changed by sign * share of its load."""
    v = rest_noise + noise[f] * (share * share)
    for j in range(1, c.shape[0]):
        x = load[j, g] + sign * (r[j, f] * share)
        v += x * x
    return _power(((load[0, g] + sign * (r[0, f] * share)) + kappa * v) * scale, q)


@_compiled
def _replica_move(
    slots: Int, c: Float, noise: Float, n: Int, r: Float, rn: Float, load: Float,
    own_noise: Float, cost: Float, kappa: float, q: int, scale: float, a: int, limit: float,
    near: Bool, inter: float,
) -> tuple[float, int, int]:  # fmt: skip
    """See `kernels_numpy._replica_move`."""
    G, C = slots.shape
    J, E = c.shape
    ease, press_all, press = np.zeros(E), np.zeros(E), np.empty(G * C)
    for g in range(G):
        for column in range(C):
            e = slots[g, column]
            rest = own_noise[g] - rn[e]
            held = float(n[e])
            more, less = 1.0 / (held + 1.0), 1.0 / max(held - 1.0, 1.0)
            eased = _changed(load, rest, c, noise, r, e, -1.0, more, kappa, q, scale, g)
            ease[e] += eased - cost[g]
            pressed = _changed(load, rest, c, noise, r, e, 1.0, less, kappa, q, scale, g)
            press[g * C + column] = pressed - cost[g]
            press_all[e] += press[g * C + column]
    best, best_s, best_e = 0.0, 0, 0
    for turn in range(2):
        for g in range(G):
            if (g == a) != (turn == 1):
                continue
            for column in range(C):
                f, s = slots[g, column], g * C + column
                if n[f] < 2:
                    continue
                for i in range(E if g == a else C):
                    e = i if g == a else slots[a, i]
                    if _holds(slots, g, e):
                        continue
                    more = 1.0 / (n[e] + 1.0)
                    v = (own_noise[g] - rn[f]) + noise[e] * (more * more)
                    for j in range(1, J):
                        x = (load[j, g] - r[j, f]) + c[j, e] * more
                        v += x * x
                    now = ((load[0, g] - r[0, f]) + c[0, e] * more) + kappa * v
                    gain = ((press_all[f] - press[s]) + ease[e]) + (
                        _power(now * scale, q) - cost[g]
                    )
                    if not gain < -limit:
                        continue
                    score = gain / (1.0 if near[g, e] else inter)
                    if score < best:
                        best, best_s, best_e = score, s, e
    return best, best_s, best_e


@_compiled
def _scenario_rank(
    slots: Int, r: Float, inv: Float, load: Float, cost: Float, q: int, g: int
) -> None:
    for k in range(inv.size):
        load[g, k] = 0.0
    for e in slots[g]:
        for k in range(inv.size):
            load[g, k] += r[e, k]
    total = 0.0
    for k in range(inv.size):
        total += _power(load[g, k] * inv[k], q)
    cost[g] = total


@_compiled
def _best_partner(
    slots: Int, r: Float, inv: Float, load: Float, cost: Float, q: int, a: int, since: int,
    changed: Int, found: Int, gains: Float,
) -> None:  # fmt: skip
    """Improve found[a] (slot of a, partner, its slot) and gains[a] by the partners changed after
    `since`; of equal gains the first in the order of (slot, partner, its slot)."""
    G, C = slots.shape
    K = r.shape[1]
    best, best_i, best_g, best_j = gains[a], found[a, 0], found[a, 1], found[a, 2]
    for i in range(C):
        o = slots[a, i]
        for g in range(G):
            if changed[g] <= since or not cost[g] < cost[a] or _holds(slots, g, o):
                continue
            # beyond this no sum can win; the margin is far above what rounding adds
            limit = (cost[a] + cost[g]) * (1.0 + 1e-9) + best
            for j in range(C):
                e = slots[g, j]
                if _holds(slots, a, e):
                    continue
                now = 0.0
                for k in range(K):
                    d = r[e, k] - r[o, k]
                    ours = _power((load[a, k] + d) * inv[k], q)
                    now += ours + _power((load[g, k] - d) * inv[k], q)
                    if now > limit:
                        break
                gain = now - (cost[a] + cost[g])
                first = i < best_i or (i == best_i and (g < best_g or (g == best_g and j < best_j)))
                if gain < best or (gain == best and best_g >= 0 and first):
                    best, best_i, best_g, best_j = gain, i, g, j
    gains[a] = best
    found[a, 0], found[a, 1], found[a, 2] = best_i, best_g, best_j


@_compiled
def search_scenarios(slots: Int, r: Float, q: int, budget: int, price: float, misses: int) -> int:
    """See `kernels_numpy.search_scenarios`."""
    G, K = slots.shape[0], r.shape[1]
    load, cost, inv = np.empty((G, K)), np.empty(G), np.ones(K)
    for g in range(G):
        _scenario_rank(slots, r, inv, load, cost, q, g)
    for k in range(K):
        top = 0.0
        for g in range(G):
            top = max(top, load[g, k])
        inv[k] = 1.0 / top
    for g in range(G):
        _scenario_rank(slots, r, inv, load, cost, q, g)
    stale = np.zeros(G, dtype=np.bool_)
    # what was found for a rank holds until it or its partner changes: hopeless ranks come again
    # after every swap, and only the two ranks of the swap need another look then
    changed, looked = np.zeros(G, dtype=np.int64), np.full(G, -1)
    found, gains = np.full((G, 3), -1), np.zeros(G)
    used, missed, now_at = 0, 0, 0
    while used + 2 <= budget and missed < misses:
        a, total = -1, 0.0
        for g in range(G):
            total += cost[g]
            if not stale[g] and (a < 0 or cost[g] > cost[a]):
                a = g
        if a < 0:
            break
        since = looked[a]
        if since < changed[a] or (found[a, 1] >= 0 and since < changed[found[a, 1]]):
            since = -1
            gains[a] = 0.0
            found[a] = -1
        _best_partner(slots, r, inv, load, cost, q, a, since, changed, found, gains)
        looked[a] = now_at
        if not gains[a] < -price * total:
            stale[a] = True
            missed += 1
            continue
        i, g, j = found[a]
        out = slots[a, i]
        slots[a, i] = slots[g, j]
        slots[g, j] = out
        _scenario_rank(slots, r, inv, load, cost, q, a)
        _scenario_rank(slots, r, inv, load, cost, q, g)
        now_at += 1
        changed[a] = changed[g] = now_at
        used += 2
        stale[:] = False
        missed = 0
    return used // 2
