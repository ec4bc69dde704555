"""The window as a few typical steps of the near future, each scaled to mean rank load 1.

Averaging over blocks of steps drops counting noise, which no plan can exploit; keeping time order
keeps drift and bursts, which totals would hide.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]

STEADY_BLOCKS: Final = 24
MOVING_BLOCKS: Final = 32
MOVING_EXCESS: Final = 0.055
"""Change of expert loads along the window, noise taken off, above which loads count as moving:
slowly walking generator traces stay below 0.04, drifting and bursty ones above 0.08."""
FLOOR: Final = 1e-6
"""Share of the mean expert load that every expert gets, so that idle ones still spread."""


def blocks(window: Float, count: int) -> Float:
    """float64 [count, L, E]; means of `count` runs of steps of nearly equal length, in order."""
    W = window.shape[0]
    edges = np.linspace(0, W, min(count, W) + 1).astype(np.int64)
    sums = np.add.reduceat(window, edges[:-1], axis=0)
    return sums / np.diff(edges)[:, None, None]


def scale(block_means: Float, num_gpus: int) -> Float:
    """Scale every block and layer to mean rank load 1, experts without load to nearly 0.

    float64 [K, L, E] -> float64 [L, K, E], contiguous.
    """
    E = block_means.shape[2]
    total = block_means.sum(axis=2, keepdims=True)
    share = np.divide(block_means, total, out=np.full_like(block_means, 1.0 / E), where=total > 0)
    mixed = (share + FLOOR / E) / (1.0 + FLOOR) * num_gpus
    return np.ascontiguousarray(mixed.transpose(1, 0, 2))


def moving_excess(window: Float) -> float:
    """How much expert loads change from one eighth of the window to the next, beyond noise.

    Relative root mean square of the change of an expert's share, weighted by load, with the
    variance that Poisson counts would show taken off. 0 for expectations that stand still.
    """
    if window.shape[0] < 8:
        return 0.0
    means = blocks(window, 8)
    total = means.sum(axis=2, keepdims=True)
    if not (total > 0).all():
        return 0.0
    share = means / total
    change = np.diff(share, axis=0)
    typical = share.mean(axis=0)
    counted = total.mean(axis=(0, 2)) * (window.shape[0] / 8)
    noise = 2.0 * change.shape[0] * float((1.0 / counted).sum())
    power = float((typical**2).sum()) * change.shape[0]
    return float(np.sqrt(max(float((change**2).sum()) - noise, 0.0) / power))


def denoise(block_means: Float, steps_per_block: float) -> Float:
    """Keep of every block's deviation from the mean what is common to many experts and layers.

    Loads move along few directions (the mix of topics), counting noise along all. With deviations
    scaled to unit noise, singular values below the Marchenko-Pastur edge are noise; those above
    are shrunk. [K, L, E] -> [K, L, E].
    """
    K = block_means.shape[0]
    total = block_means.sum(axis=2, keepdims=True)
    if K < 4 or not (total > 0).all():
        return block_means
    share = block_means / total
    mean = share.mean(axis=0, keepdims=True)
    per_share = np.sqrt(float(total.mean()) * steps_per_block / np.maximum(mean, 1e-12))
    z = ((share - mean) * per_share).reshape(K, -1)
    values, directions = np.linalg.eigh(z @ z.T)
    n = z.shape[1]
    edge = (np.sqrt(n) + np.sqrt(K)) ** 2
    kept = np.where(
        values > 1.01 * edge, np.sqrt(np.maximum(1.0 - n / np.maximum(values, 1e-300), 0.0)), 0.0
    )
    smooth = ((directions * kept) @ (directions.T @ z)).reshape(block_means.shape) / per_share
    return np.maximum(mean + smooth, 0.0) * total


def recentre(block_means: Float) -> Float:
    """Half of the blocks as they are, half moved so that they scatter around the latest ones.

    Slow walks go on from where they are; the other half guards against the past coming back.
    """
    K = block_means.shape[0]
    if K < 8:
        return block_means
    share = block_means / np.maximum(block_means.sum(axis=2, keepdims=True), 1e-300)
    latest = share[-(K // 8) :].mean(axis=0, keepdims=True)
    moved = np.maximum(latest + share - share.mean(axis=0, keepdims=True), 0.2 * latest)
    return np.concatenate([moved[::2], share[1::2]])


def make_scenarios(window: Float, num_gpus: int, count: int | None) -> tuple[Float, bool]:
    """(scenarios float64 [L, K, E] of mean rank load 1, whether loads are moving).

    count None: 24 for steady loads, 32 for moving ones.
    """
    moving = moving_excess(window) > MOVING_EXCESS
    if count is None:
        count = MOVING_BLOCKS if moving else STEADY_BLOCKS
    means = blocks(window, count)
    if not moving and means.shape[0] >= 8 and window.shape[0] >= 8:
        means = recentre(denoise(means, window.shape[0] / means.shape[0]))
    return scale(means, num_gpus), moving
