"""Columns that one voter's opinion gives: of the run, its boxes, its neighbours, the whole page."""

from __future__ import annotations

import numpy as np

from deepinfer_search_fetch.extract.layout import Floats, Ints, Layout

CHAIN = 4
_NEIGHBOURS = (-3, -2, -1, 1, 2, 3)
_RADIUS = 8
_FAR = 60.0
_NEAR = 50.0


def voter_columns(vote: Floats, chars: Floats, layout: Layout, chain: list[Ints]) -> list[Floats]:
    """vote: float64 [runs], 0..1; chars: characters of every run; chain: `ancestors(CHAIN)`."""
    mass = vote * chars
    in_box = layout.below(mass)
    share = in_box / np.maximum(layout.below(chars), 1.0)
    return [
        vote,
        *(share[boxes] for boxes in chain),
        *(shifted(vote, offset) for offset in _NEIGHBOURS),
        window(vote, _RADIUS),
        np.full(len(vote), mass.sum() / max(chars.sum(), 1.0)),
        *_span_columns(vote, mass, in_box, share, layout),
    ]


def _span_columns(
    vote: Floats, mass: Floats, in_box: Floats, share: Floats, layout: Layout
) -> list[Floats]:
    """Where a run lies relative to the stretch and to the container that the voter chose."""
    n = len(vote)
    total = float(mass.sum())
    chosen = np.flatnonzero(vote > 0.5)
    if total <= 0 or not len(chosen):
        return [np.full(n, -1.0)] * 8
    at = np.arange(n)
    after = np.minimum(np.searchsorted(chosen, at), len(chosen) - 1)
    nearest = np.minimum(
        np.abs(chosen[after] - at), np.abs(chosen[np.maximum(after - 1, 0)] - at)
    ).astype(np.float64)
    wide = _deepest(in_box >= 0.9 * total, layout)
    tight = _deepest(in_box >= 0.6 * total, layout)
    inside = _inside(wide, at, layout)
    child = layout.child_towards(wide)[layout.box_of]
    return [
        (np.cumsum(mass) - mass / 2) / total,
        np.clip(at - chosen[0], -_FAR, _FAR).astype(np.float64),
        np.clip(at - chosen[-1], -_FAR, _FAR).astype(np.float64),
        np.minimum(nearest, _NEAR),
        inside,
        np.where(inside > 0, share[child], -1.0),
        np.full(n, share[wide]),
        _inside(tight, at, layout),
    ]


def _deepest(candidates: np.ndarray[tuple[int], np.dtype[np.bool_]], layout: Layout) -> int:
    return int(np.argmax(np.where(candidates, layout.depth, -1)))


def _inside(box: int, at: Ints, layout: Layout) -> Floats:
    return ((layout.first[box] <= at) & (at < layout.last[box])).astype(np.float64)


def shifted(values: Floats, offset: int, fill: float = -1.0) -> Floats:
    """values[i + offset] at place i, `fill` outside."""
    n = len(values)
    out = np.full(n, fill)
    if abs(offset) < n:
        if offset > 0:
            out[: n - offset] = values[offset:]
        else:
            out[-offset:] = values[: n + offset]
    return out


def window(values: Floats, radius: int) -> Floats:
    """Mean over the places i - radius .. i + radius that exist."""
    n = len(values)
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(n)
    low, high = np.maximum(0, at - radius), np.minimum(n, at + radius + 1)
    return (total[high] - total[low]) / (high - low)
