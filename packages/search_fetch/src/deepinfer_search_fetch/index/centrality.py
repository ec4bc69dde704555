"""Rank of nodes in a directed graph: PageRank, harmonic centrality (exact, and by HyperBall)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

DAMPING = 0.85
MAX_ROUNDS = 100
TOLERANCE = 1e-9
EXACT_UP_TO = 50_000
REGISTERS = 256
_BATCH_WORDS = 8
_EDGES_AT_ONCE = 200_000
_POPCOUNT = np.array([i.bit_count() for i in range(1 << 16)], np.uint8)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def pagerank(nodes: int, source: Ints, target: Ints, weight: Floats) -> Floats:
    """float64 [nodes], sums to 1. source, target: int64 [edges]; weight: float64 [edges], > 0.

    The mass of nodes without outgoing edges is spread over all. Stops when a round changes less
    than TOLERANCE in sum of absolute differences, or after MAX_ROUNDS.
    """
    out = np.bincount(source, weight, minlength=nodes)
    share = weight / out[source]
    dangling = out == 0
    rank = np.full(nodes, 1.0 / nodes)
    for _ in range(MAX_ROUNDS):
        flow = np.bincount(target, share * rank[source], minlength=nodes)
        following = (1 - DAMPING) / nodes + DAMPING * (flow + rank[dangling].sum() / nodes)
        change = float(np.abs(following - rank).sum())
        rank = following
        if change < TOLERANCE:
            break
    return rank


def harmonic(nodes: int, source: Ints, target: Ints) -> Floats:
    """float64 [nodes]: H(v) = sum over u != v of 1 / distance(u, v); unreachable counts 0.

    Exact up to EXACT_UP_TO nodes, HyperBall above.
    """
    if nodes <= EXACT_UP_TO:
        return harmonic_exact(nodes, source, target)
    return hyperball(nodes, source, target)


def harmonic_exact(nodes: int, source: Ints, target: Ints) -> Floats:
    """Breadth-first search from many nodes at once: one bit per start node."""
    source, starts, heads = _by_target(source, target)
    centrality = np.zeros(nodes)
    batch = 64 * _BATCH_WORDS
    for first in range(0, nodes, batch):
        members = np.arange(first, min(first + batch, nodes))
        seen = np.zeros((nodes, _BATCH_WORDS), np.uint64)
        offset = members - first
        seen[members, offset // 64] = np.uint64(1) << (offset % 64).astype(np.uint64)
        reached = seen.copy()
        distance = 0
        while reached.any():
            distance += 1
            arrived = np.zeros_like(seen)
            for rows, ids, segment in _segments(source, starts, heads):
                arrived[ids] = np.bitwise_or.reduceat(reached[rows], segment, axis=0)
            reached = arrived & ~seen
            seen |= reached
            counts = _POPCOUNT[reached.view(np.uint16)].sum(axis=1, dtype=np.int64)
            centrality += counts / distance
    return centrality


def hyperball(nodes: int, source: Ints, target: Ints) -> Floats:
    """Harmonic centrality from approximate ball sizes (HyperLogLog with REGISTERS registers).

    Boldi and Vigna, "In-Core Computation of Geometric Centralities with HyperBall", 2013; the
    relative error of a ball size is about 1.04 / sqrt(REGISTERS), 6.5 %.
    """
    source, starts, heads = _by_target(source, target)
    registers = _first_registers(nodes)
    sizes = _cardinality(registers)
    centrality = np.zeros(nodes)
    distance = 0
    while True:
        distance += 1
        following = registers.copy()
        for rows, ids, segment in _segments(source, starts, heads):
            best = np.maximum.reduceat(registers[rows], segment, axis=0)
            following[ids] = np.maximum(following[ids], best)
        if np.array_equal(following, registers):
            return centrality
        registers = following
        grown = _cardinality(registers)
        centrality += np.maximum(grown - sizes, 0.0) / distance
        sizes = grown


def positions(values: Floats) -> Ints:
    """int64 [nodes]: how many nodes are better; equal values share a position."""
    rounded = np.round(values, 12)
    return np.searchsorted(np.sort(-rounded), -rounded, side="left")


def _by_target(source: Ints, target: Ints) -> tuple[Ints, Ints, Ints]:
    """(sources sorted by target, first edge of each distinct target, the distinct targets)."""
    order = np.argsort(target, kind="stable")
    heads, starts = np.unique(target[order], return_index=True)
    return source[order], starts.astype(np.int64), heads


def _segments(source: Ints, starts: Ints, heads: Ints) -> list[tuple[Ints, Ints, Ints]]:
    """Slices of about _EDGES_AT_ONCE edges that never cut a target's edges apart."""
    out: list[tuple[Ints, Ints, Ints]] = []
    ends = np.append(starts[1:], len(source))
    first = 0
    while first < len(heads):
        last = int(np.searchsorted(ends, starts[first] + _EDGES_AT_ONCE, side="right"))
        last = max(last, first + 1)
        rows = source[starts[first] : ends[last - 1]]
        out.append((rows, heads[first:last], starts[first:last] - starts[first]))
        first = last
    return out


def _first_registers(nodes: int) -> NDArray[np.uint8]:
    """uint8 [nodes, REGISTERS]: each node counts itself once."""
    mixed = np.arange(1, nodes + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    bucket = (mixed % np.uint64(REGISTERS)).astype(np.int64)
    # Of the remaining 56 bits: 1 + number of leading zeros.
    rest = (mixed >> np.uint64(8)).astype(np.float64)
    zeros = 56 - np.ceil(np.log2(rest + 1)).astype(np.int64)
    registers = np.zeros((nodes, REGISTERS), np.uint8)
    registers[np.arange(nodes), bucket] = (1 + zeros).astype(np.uint8)
    return registers


def _cardinality(registers: NDArray[np.uint8]) -> Floats:
    """float64 [nodes]: the HyperLogLog estimate, linear counting for small sets."""
    alpha = 0.7213 / (1 + 1.079 / REGISTERS)
    sizes = np.empty(len(registers))
    for first in range(0, len(registers), 50_000):
        part = registers[first : first + 50_000]
        raw = alpha * REGISTERS**2 / np.ldexp(1.0, -part.astype(np.int32)).sum(axis=1)
        empty = (part == 0).sum(axis=1)
        linear = REGISTERS * np.log(REGISTERS / np.maximum(empty, 1))
        sizes[first : first + 50_000] = np.where(
            (raw <= 2.5 * REGISTERS) & (empty > 0), linear, raw
        )
    return sizes
