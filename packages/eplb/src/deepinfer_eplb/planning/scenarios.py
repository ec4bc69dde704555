"""The window cut into blocks of steps, each scaled to mean rank load 1."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

FLOOR: Final = 1e-6
"""Share of the mean expert load that every expert gets, so that idle ones still spread."""
EIGHTHS: Final = 8


def blocks(window: Float, count: int) -> Float:
    """float64 [count, L, E]; means of `count` runs of steps of nearly equal length, in order."""
    sums, steps = block_sums(window, count)
    return sums / steps[:, None, None]


def block_sums(window: Float, count: int) -> tuple[Float, Float]:
    """(sums float64 [K, L, E], steps in each block float64 [K]); K = count or fewer."""
    W = window.shape[0]
    edges = np.linspace(0, W, min(count, W) + 1).astype(np.int64)
    return np.add.reduceat(window, edges[:-1], axis=0), np.diff(edges).astype(np.float64)


def scale(loads: Float, num_gpus: int) -> Float:
    """Scale the last axis (experts) to mean rank load 1, experts without load to nearly 0."""
    E = loads.shape[-1]
    total = loads.sum(axis=-1, keepdims=True)
    share = np.divide(loads, total, out=np.full_like(loads, 1.0 / E), where=total > 0)
    return (share + FLOOR / E) / (1.0 + FLOOR) * num_gpus


def moving_excess(window: Float) -> float:
    """How much expert loads change from one eighth of the window to the next, beyond noise.

    Relative root mean square of the change of an expert's share, weighted by load, with the
    variance that Poisson counts would show taken off. 0 for expectations that stand still.
    """
    if window.shape[0] < EIGHTHS:
        return 0.0
    counts, _ = block_sums(window, EIGHTHS)
    total = counts.sum(axis=2, keepdims=True)
    if not (total > 0).all():
        return 0.0
    share = counts / total
    change = np.diff(share, axis=0)
    typical = share.mean(axis=0)
    noise = 2.0 * change.shape[0] * float((1.0 / total.mean(axis=(0, 2))).sum())
    power = float((typical**2).sum()) * change.shape[0]
    return float(np.sqrt(max(float((change**2).sum()) - noise, 0.0) / power))
