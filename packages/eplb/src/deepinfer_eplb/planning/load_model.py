"""What the next steps will look like: expected loads, the directions they vary in, and the doubt.

Loads of all experts and layers move along few directions (the mix of topics), counting noise along
all. A principal component analysis over the whole window, with counts scaled to unit noise, tells
them apart: eigenvalues below the Marchenko-Pastur edge are noise, those above are shrunk by what
noise adds to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.planning.scenarios import FLOOR, block_sums, moving_excess

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

STEADY_BLOCKS: Final = 50
MOVING_BLOCKS: Final = 100
FEWEST_BLOCKS: Final = 4
DIRECTIONS: Final = 16
EDGE_MARGIN: Final = 1.05
NOISE_QUARTILE: Final = -0.808
"""Lower quartile of the semicircle law on [-2, 2], which noise eigenvalues follow for K << n."""
MOVING_EXCESS: Final = 0.055
"""Change of expert loads along the window, noise taken off, above which loads count as moving:
slowly walking generator traces stay below 0.04, drifting and bursty ones above 0.08."""
PERSISTENCE: Final = 0.3
"""How far the expectation of slowly moving loads lies from the window's mean towards its end."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Loads scaled to mean rank load 1.

    components: float64 [L, J, E]; row 0 the expected load, rows 1.. the load along uncorrelated
                directions of unit variance over time.
    noise:      float64 [L, E]; variance of row 0 from counting.
    path:       float64 [K, J - 1]; where the blocks of the window lie along the directions.
    moving:     whether loads change much within the window.
    """

    components: Float
    noise: Float
    path: Float
    moving: bool


def fit(
    window: Float, num_gpus: int, *, totals: bool = False, blocks: int | None = None
) -> LoadModel:
    """Model of loads [W, L, E]; totals: expected loads only; blocks: most blocks to cut into."""
    moving = not totals and moving_excess(window) > MOVING_EXCESS
    if blocks is None:
        blocks = MOVING_BLOCKS if moving else STEADY_BLOCKS
    sums, _ = block_sums(window, 1 if totals else blocks)
    K, L, E = sums.shape
    counted = sums.sum(axis=2)  # [K, L]
    everything = counted.sum(axis=0)  # [L]
    pooled = sums.sum(axis=0)
    mean = np.divide(
        pooled, everything[:, None], out=np.full((L, E), 1.0 / E), where=everything[:, None] > 0
    )
    scale = num_gpus / (1.0 + FLOOR)
    expected, directions, dispersion = mean, np.empty((0, L, E)), 1.0
    path = np.empty((K, 0))
    if K >= FEWEST_BLOCKS and counted.any():
        path, directions, dispersion = _directions(sums, counted, mean)
        if not moving and path.size:
            latest = path[-max(1, K // 16) :].mean(axis=0)
            expected = np.maximum(mean + PERSISTENCE * np.tensordot(latest, directions, 1), 0.0)
    doubt = mean * (dispersion / np.maximum(everything, 1.0))[:, None]
    if totals:
        doubt = np.zeros_like(doubt)
    components = np.concatenate([(expected + FLOOR / E)[None], directions]) * scale
    return LoadModel(
        components=np.ascontiguousarray(components.transpose(1, 0, 2)),
        noise=doubt * (scale * scale),
        path=path,
        moving=moving,
    )


def _directions(sums: Float, counted: Float, mean: Float) -> tuple[Float, Float, float]:
    """(path [K, r] of unit variance, directions [r, L, E], noise relative to Poisson counts)."""
    K, L, E = sums.shape
    # a layer that was idle for a block says nothing about it: its mean stands in
    seen = (mean > 0) & (counted.sum(axis=0) > 0)[:, None]
    busy = counted[:, :, None] > 0
    share = np.divide(sums, counted[:, :, None], out=np.tile(mean, (K, 1, 1)), where=busy)
    unit = np.sqrt(np.divide(1.0, mean, out=np.zeros_like(mean), where=seen))
    z = ((share - mean[None]) * (np.sqrt(counted)[:, :, None] * unit[None])).reshape(K, L * E)
    values, vectors = np.linalg.eigh(z @ z.T)
    n = int(seen.sum())
    dispersion = 1.0
    if 8 <= K <= n // 4:
        # the lower quartile is noise even when half of the blocks' directions are signal
        quartile = max(float(values[K // 4]), 0.0)
        dispersion = quartile / (n + NOISE_QUARTILE * float(np.sqrt(n * K)))
    edge = EDGE_MARGIN * dispersion * (np.sqrt(n) + np.sqrt(K)) ** 2
    kept = np.flatnonzero(values > edge)[::-1][:DIRECTIONS]
    shrink = np.sqrt(np.maximum(1.0 - n * dispersion / np.maximum(values[kept], 1e-300), 0.0))
    typical = np.sqrt(np.maximum(counted.mean(axis=0), 1e-300))[:, None]
    back = np.divide(1.0, unit, out=np.zeros_like(unit), where=seen) / typical
    found = (vectors[:, kept].T @ z).reshape(kept.size, L, E) * back[None]
    return (
        vectors[:, kept] * np.sqrt(K),
        found * (shrink / np.sqrt(K))[:, None, None],
        dispersion,
    )


def trust_old(model_c: Float, noise: Float, old: Int, num_gpus: int) -> Float:
    """Components [J, E] with what the old placement tells about them; old: [S].

    Ranks of the old placement were balanced on earlier counts, as noisy as these. How much their
    loads now scatter beyond this window's noise says how far to believe that: empirical Bayes with
    a normal prior around the mean rank, the posterior shared out over the experts of a rank in
    proportion to their doubt (ranks taken one by one, though replicated experts tie them).
    """
    n = np.bincount(old, minlength=noise.size).astype(np.float64)
    held = old.reshape(num_gpus, -1)
    load = (model_c[0] / n)[held].sum(axis=1)
    doubt = (noise / (n * n))[held].sum(axis=1)
    surplus = load - load.mean()
    beyond = max(float(np.mean(surplus * surplus) - np.mean(doubt)), 0.0)
    spread = doubt + beyond
    pull = np.divide(surplus, spread, out=np.zeros_like(surplus), where=spread > 0)
    per_expert = np.bincount(held.ravel(), weights=np.repeat(pull, held.shape[1]), minlength=n.size)
    out = model_c.copy()
    out[0] = np.maximum(model_c[0] - noise / n * per_expert, 0.1 * model_c[0])
    return out
