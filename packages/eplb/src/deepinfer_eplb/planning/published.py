"""Two published policies, written anew from their descriptions, to compare with.

* `totals_policy`: replicas to the largest total/n, then each replica to the lightest rank with a
  free slot (the 2025 open EPLB); node-limited, whole groups of experts go to nodes in that way
  first.
* `per_step_policy`: replicas chosen to minimise the sum over steps of the largest replica, then
  each to the rank that raises the sum over steps of the peak least (DeepInfer 0.1.0).

Neither uses the placement in force, so both move almost everything.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import as_loads, check_topology

TIE = 1e-9


def totals_policy(
    window: Any, num_gpus: int, num_slots: int, num_groups: int = 1, num_nodes: int = 1
) -> npt.NDArray[np.int32]:
    """int32 [L, S] from loads [W, L, E]."""
    totals = as_loads(window).sum(axis=0)
    check_topology(totals.shape[1], num_gpus, num_slots)
    return np.stack(
        [totals_layer(v, num_gpus, num_slots, num_groups, num_nodes) for v in totals]
    ).astype(np.int32)


def totals_layer(
    v: npt.NDArray[Any], G: int, S: int, groups: int = 1, nodes: int = 1
) -> npt.NDArray[np.int64]:
    """int64 [S] of one layer's totals [E].

    In float32, and in numpy's default order of equal loads, as its ports compute: near ties fall
    as they do there, which decides by how much a plan is better or worse.
    """
    E = v.size
    v = v.astype(np.float32)
    home = _packed(v.reshape(groups, -1).sum(axis=1), nodes)
    out: list[npt.NDArray[np.int64]] = []
    for node in range(nodes):
        # the groups of a node in the order in which they came to it
        members = (home[node][:, None] * (E // groups) + np.arange(E // groups)).ravel()
        inside = v[members]
        n = np.ones(members.size, dtype=np.int64)
        replicas = [*range(members.size)]
        for _ in range(S // nodes - members.size):
            e = int(np.argmax(inside / n))
            n[e] += 1
            replicas.append(e)
        held = np.array(replicas)
        ranks = _packed((inside / n)[held], G // nodes)
        out += [members[held[rank]] for rank in ranks]
    return np.concatenate(out)


def _packed(loads: npt.NDArray[Any], packs: int) -> list[npt.NDArray[np.int64]]:
    """Items of each pack: heaviest first, each to the lightest pack that has room."""
    room = loads.size // packs
    if room == 1:
        return [np.array([i]) for i in range(packs)]
    weight = np.zeros(packs)
    packed: list[list[int]] = [[] for _ in range(packs)]
    for i in np.argsort(-loads).tolist():
        g = int(np.argmin(weight))
        packed[g].append(i)
        weight[g] += loads[i]
        if len(packed[g]) == room:
            weight[g] = np.inf
    return [np.array(p) for p in packed]


def per_step_policy(window: Any, num_gpus: int, num_slots: int) -> npt.NDArray[np.int32]:
    """int32 [L, S] from loads [W, L, E]."""
    loads = as_loads(window)
    check_topology(loads.shape[2], num_gpus, num_slots)
    return np.stack(
        [_per_step_layer(loads[:, layer], num_gpus, num_slots) for layer in range(loads.shape[1])]
    )


def _per_step_layer(v: npt.NDArray[np.float64], G: int, S: int) -> npt.NDArray[np.int32]:
    T, E = v.shape
    C = S // G
    # a tiny increasing term makes the arg-max of every step unique
    scale = max(float(v.max(initial=0.0)), 1.0)
    v = v + scale * TIE * np.arange(E)[None, :]
    n = np.ones(E)
    steps = np.arange(T)
    share = v.copy()
    for _ in range(S - E):
        first = share.argmax(axis=1)
        top = share[steps, first]
        share[steps, first] = -np.inf
        second = share.max(axis=1)
        share[steps, first] = top
        # giving e one more replica changes only the steps where e is the largest
        relieved = np.maximum(second, v[steps, first] / (n[first] + 1))
        saved = np.bincount(first, weights=top - relieved, minlength=E)
        e = int(np.argmax(saved))
        n[e] += 1
        share[:, e] = v[:, e] / n[e]
    replicas = np.repeat(np.arange(E), n.astype(int))
    order = replicas[np.argsort(-(v.sum(axis=0) / n)[replicas], kind="stable")]
    load, used, peak = np.zeros((G, T)), np.zeros(G, dtype=int), np.zeros(T)
    out = np.empty(S, dtype=np.int32)
    for e in order:
        raised = np.maximum(peak[None, :], load + (v[:, e] / n[e])[None, :]).sum(axis=1)
        g = int(np.argmin(np.where(used < C, raised, np.inf)))
        out[g * C + used[g]] = e
        used[g] += 1
        load[g] += v[:, e] / n[e]
        peak = np.maximum(peak, load[g])
    return out
