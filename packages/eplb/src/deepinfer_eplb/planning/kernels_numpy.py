"""Placing and searching in one layer, in numpy. `kernels_numba` holds the compiled twins.

Both give the same plan to the byte: sums run in one fixed order, powers are repeated squarings,
ties go to the lowest index.

Objective: F = sum_g ((m_g + kappa * v_g) / top) ** p, p = 2 ** q, with m_g the expected load of
rank g and v_g the variance of its load. For loads that scatter normally, E[exp(lambda * load)] is
exp(lambda * (m + lambda * v / 2)): F follows the expected maximum over ranks, with kappa = lambda
/ 2, and needs no list of scenarios.

Shapes: c float64 [J, E], row 0 the expected load of every expert, the others its load along
uncorrelated directions of unit variance, so that v_g = sum_j c_g[j] ** 2 + sum of noise; noise
float64 [E], variance of row 0; slots int64 [G, C] expert ids or -1; n int64 [E] replicas; near
bool [G, E], whether the node of a rank held the expert before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]


def power(x: Float, q: int) -> Float:
    """x ** (2 ** q) by repeated squaring."""
    for _ in range(q):
        x = x * x
    return x


def replica_loads(c: Float, noise: Float, n: Int) -> tuple[Float, Float]:
    """([J, E] load, [E] noise variance) of one replica."""
    m = n.astype(np.float64)
    return c / m, noise / (m * m)


def rank_state(slots: Int, r: Float, rn: Float) -> tuple[Float, Float]:
    """([J, G] load of ranks, [G] noise variance), slot by slot in order."""
    load, noise = np.zeros((r.shape[0], slots.shape[0])), np.zeros(slots.shape[0])
    for column in range(slots.shape[1]):
        held = slots[:, column]
        at = np.maximum(held, 0)
        load += np.where(held >= 0, r[:, at], 0.0)
        noise += np.where(held >= 0, rn[at], 0.0)
    return load, noise


def base(load: Float, noise: Float, kappa: float) -> Float:
    """m + kappa * v; load [J, ...], noise [...]."""
    v = noise
    for j in range(1, load.shape[0]):
        v = v + load[j] * load[j]
    return load[0] + kappa * v


def place(slots: Int, todo: Int, r: Float, rn: Float, kappa: float, q: int) -> None:
    """Fill empty slots with `todo` in order, each where F rises least.

    A rank that already holds the expert is used only when no other has an empty slot.
    """
    load, noise = rank_state(slots, r, rn)
    for e in todo.tolist():
        free = (slots < 0).any(axis=1)
        apart = free & ~(slots == e).any(axis=1)
        after = base(load + r[:, e][:, None], noise + rn[e], kappa)
        rise = power(after, q) - power(base(load, noise, kappa), q)
        g = int(np.where(apart if apart.any() else free, rise, np.inf).argmin())
        slots[g, int((slots[g] < 0).argmax())] = e
        load[:, g] += r[:, e]
        noise[g] += rn[e]


def search(
    slots: Int,
    c: Float,
    noise: Float,
    n: Int,
    kappa: float,
    q: int,
    near: Bool,
    inter: float,
    budget: int,
    price: float,
    misses: int,
    replica_moves: bool,
) -> tuple[int, int]:
    """Move experts of the costliest rank, most gain for the cost of moving first.

    A swap exchanges two experts between two ranks; a replica move gives a slot of an expert with
    spare replicas to one that needs it. An arrival costs 1 from the own node, `inter` from another.
    budget: slots that may change; price: relative fall of F ** (1/p) a changed slot must bring;
    misses: ranks in a row without such a move that end the search.
    Changes slots and n in place; returns (swaps, replica moves).
    """
    G, C = slots.shape
    owner = np.repeat(np.arange(G), C)
    r, rn = replica_loads(c, noise, n)
    load, own_noise = rank_state(slots, r, rn)
    start = base(load, own_noise, kappa)
    scale = 1.0 / float(start.max())
    cost = power(start * scale, q)
    stale = np.zeros(G, dtype=np.bool_)
    arrival = np.where(near, 1.0, inter)
    used = swaps = moves = missed = before = 0
    while used < budget and missed < misses and not stale.all():
        a = int(np.where(stale, -1.0, cost).argmax())
        total = float(np.add.accumulate(cost)[-1])
        limit = price * float(2**q) * total + 1e-12 * float(cost[a])
        flat, mine = slots.ravel(), slots[a]
        best, kind, x, y = 0.0, 0, 0, 0
        if used + 2 <= budget:
            # valid[i, s]: slot s is on a cheaper rank, neither rank would hold an expert twice
            holds = (slots[None, :, :] == mine[:, None, None]).any(axis=2)
            valid = (cost < cost[a])[owner][None, :] & ~holds[:, owner]
            valid &= ~(flat[:, None] == mine[None, :]).any(axis=1)[None, :]
            out, into = r[:, mine][:, :, None], r[:, flat][:, None, :]
            kept = (own_noise[a] - rn[mine])[:, None] + rn[flat][None, :]
            ours = base((load[:, a][:, None, None] - out) + into, kept, kappa)
            kept = (own_noise[owner] - rn[flat])[None, :] + rn[mine][:, None]
            theirs = base((load[:, owner][:, None, :] - into) + out, kept, kappa)
            gain = (power(ours * scale, q) + power(theirs * scale, q)) - (cost[a] + cost[owner])
            gain = np.where(valid & (gain < -2.0 * limit), gain, 0.0)
            score = gain / (arrival[owner][:, mine].T + arrival[a, flat][None, :])
            at = int(score.argmin())
            if score.flat[at] < best:
                best, kind = float(score.flat[at]), 1
                x, y = divmod(at, G * C)
        if replica_moves:
            found = _replica_move(
                slots, c, noise, n, r, rn, load, own_noise, cost, kappa, q, scale, a, limit, arrival
            )
            if found[0] < best:
                best, kind, x, y = found[0], 2, found[1], found[2]
        if kind == 0:
            stale[a] = True
            missed += 1
            continue
        if kind == 1:
            g, j = divmod(y, C)
            slots[a, x], slots[g, j] = slots[g, j], slots[a, x]
        else:
            before = int(slots.flat[x])
            slots.flat[x] = y
            n[before] -= 1
            n[y] += 1
            r, rn = replica_loads(c, noise, n)
        load, own_noise = rank_state(slots, r, rn)
        cost = power(base(load, own_noise, kappa) * scale, q)
        if kind == 2 and not float(np.add.accumulate(cost)[-1]) < total - limit:
            # the estimate takes ranks that hold both experts one by one: here it was wrong
            slots.flat[x] = before
            n[before] += 1
            n[y] -= 1
            r, rn = replica_loads(c, noise, n)
            load, own_noise = rank_state(slots, r, rn)
            cost = power(base(load, own_noise, kappa) * scale, q)
            stale[a] = True
            missed += 1
            continue
        used += 3 - kind
        swaps += kind == 1
        moves += kind == 2
        stale[:] = False
        missed = 0
    return swaps, moves


def _replica_move(
    slots: Int, c: Float, noise: Float, n: Int, r: Float, rn: Float, load: Float,
    own_noise: Float, cost: Float, kappa: float, q: int, scale: float, a: int, limit: float,
    arrival: Float,
) -> tuple[float, int, int]:  # fmt: skip
    """Best (score, flat slot, expert): relieve rank a of part of an expert, or of a whole slot."""
    G, C = slots.shape
    E = n.size
    owner, flat = np.repeat(np.arange(G), C), slots.ravel()
    more, less = 1.0 / (n + 1.0), 1.0 / np.maximum(n - 1.0, 1.0)
    at_load, at_noise, at_cost = load[:, owner], own_noise[owner] - rn[flat], cost[owner]
    eased = base(at_load - r[:, flat] * more[flat],
                 at_noise + noise[flat] * (more[flat] * more[flat]), kappa)  # fmt: skip
    ease = np.bincount(flat, weights=power(eased * scale, q) - at_cost, minlength=E)
    pressed = base(at_load + r[:, flat] * less[flat],
                   at_noise + noise[flat] * (less[flat] * less[flat]), kappa)  # fmt: skip
    press = power(pressed * scale, q) - at_cost
    # what the other holders of the expert in slot s pay if s is given up
    others = np.bincount(flat, weights=press, minlength=E)[flat] - press
    spare = n[flat] > 1
    best = (0.0, 0, 0)
    for rows, experts in (
        (np.flatnonzero(spare & (owner != a)), slots[a]),
        (np.flatnonzero(spare & (owner == a)), np.arange(E)),
    ):
        held = flat[rows]
        now = base(
            (at_load[:, rows] - r[:, held])[:, :, None] + (c[:, experts] * more[experts])[:, None],
            at_noise[rows][:, None] + (noise[experts] * (more[experts] * more[experts]))[None, :],
            kappa,
        )
        gain = (others[rows][:, None] + ease[experts][None, :]) + (
            power(now * scale, q) - at_cost[rows][:, None]
        )
        twice = (slots[owner[rows]][:, None, :] == experts[None, :, None]).any(axis=2)
        gain = np.where(twice | ~(gain < -limit), 0.0, gain)
        score = gain / arrival[owner[rows]][:, experts]
        if score.size and float(score.min()) < best[0]:
            i, j = divmod(int(score.argmin()), experts.size)
            best = (float(score[i, j]), int(rows[i]), int(experts[j]))
    return best


def search_scenarios(slots: Int, r: Float, q: int, budget: int, price: float, misses: int) -> int:
    """Swap experts of the costliest rank, best exact gain first; returns the swaps made.

    r: float64 [E, K], load of one replica in each of K scenarios. Objective: the sum over scenarios
    and ranks of (load / the busiest rank's at the start) ** (2 ** q), for ranks of so few slots
    that variances say too little. price: part of the objective that a swap must win; budget: slots
    that may change; misses: ranks in a row without such a swap that end the search.
    """
    G, C = slots.shape
    owner = np.repeat(np.arange(G), C)
    load = _scenario_loads(slots, r)
    inv = 1.0 / load.max(axis=0)

    def costs(of: Float) -> Float:
        # one scenario after the other, as the compiled twin adds
        return np.add.accumulate(power(of * inv, q), axis=-1)[..., -1]

    cost = costs(load)
    stale = np.zeros(G, dtype=np.bool_)
    used = missed = 0
    while used + 2 <= budget and missed < misses and not stale.all():
        a = int(np.where(stale, -1.0, cost).argmax())
        total = float(np.add.accumulate(cost)[-1])
        flat, mine = slots.ravel(), slots[a]
        holds = (slots[None, :, :] == mine[:, None, None]).any(axis=2)
        valid = (cost < cost[a])[owner][None, :] & ~holds[:, owner]
        valid &= ~(flat[:, None] == mine[None, :]).any(axis=1)[None, :]
        d = r[flat][None, :, :] - r[mine][:, None, :]
        ours = power((load[a][None, None, :] + d) * inv, q)
        theirs = power((load[owner][None, :, :] - d) * inv, q)
        now = np.add.accumulate(ours + theirs, axis=2)[:, :, -1]
        gain = np.where(valid, now - (cost[a] + cost[owner])[None, :], np.inf)
        at = int(gain.argmin())
        if not gain.flat[at] < -price * total:
            stale[a] = True
            missed += 1
            continue
        i, s = divmod(at, G * C)
        g, j = divmod(s, C)
        slots[a, i], slots[g, j] = slots[g, j], slots[a, i]
        for rank in (a, g):
            load[rank] = _scenario_loads(slots[rank : rank + 1], r)[0]
            cost[rank] = costs(load[rank])
        used += 2
        stale[:] = False
        missed = 0
    return used // 2


def _scenario_loads(slots: Int, r: Float) -> Float:
    load = np.zeros((slots.shape[0], r.shape[1]))
    for column in range(slots.shape[1]):
        load += r[slots[:, column]]
    return load
