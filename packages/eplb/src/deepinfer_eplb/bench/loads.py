"""Seeded expert loads for judging plans: counts of a step and what they were drawn from.

A token belongs to one of twelve domains; a domain has an affinity to every expert that changes
slowly with depth; the mix of domains walks and jumps. Counts are Poisson around the expectation.
No public per-step trace of such loads exists: this is a model of them, its parameters a judgement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.errors import LoadError

DOMAINS: Final = 12
DEPTH_CORRELATION: Final = 0.35


@dataclass(frozen=True, slots=True)
class LoadKind:
    """popularity_sd, affinity_sd: spread of log-popularity and log-affinity; zipf: exponent of a
    permuted Zipf popularity (0 = normal instead); walk: step of the domain mix per recorded step;
    revert: pull of the mix back home per real step;
    burst: chance of a burst per recorded step; static: one domain only."""

    popularity_sd: float
    affinity_sd: float
    zipf: float = 0.0
    walk: float = 0.02
    revert: float = 0.002
    burst: float = 0.0
    static: bool = False


KINDS: Final[dict[str, LoadKind]] = {
    "mild": LoadKind(0.3, 0.45),
    "skew": LoadKind(0.6, 0.9, walk=0.04),
    "zipf": LoadKind(0.3, 0.6, zipf=0.5),
    "drift": LoadKind(0.3, 0.9, walk=0.17, revert=0.01),
    "burst": LoadKind(0.3, 0.8, walk=0.05, burst=0.12),
    "static": LoadKind(0.6, 0.0, static=True),
}


@dataclass(frozen=True, slots=True)
class Trace:
    """counts: int32 [steps, L, E] assignments of each step; expected: float64 [steps, L, E]."""

    counts: npt.NDArray[np.int32]
    expected: npt.NDArray[np.float64]


def generate(
    kind: str,
    seed: int,
    *,
    steps: int = 200,
    layers: int = 58,
    experts: int = 384,
    topk: int = 6,
    tokens: int = 16_384,
    real_steps_per_record: int = 10,
) -> Trace:
    """A trace of `steps` recorded steps, one record every `real_steps_per_record` real steps."""
    if kind not in KINDS:
        raise LoadError(f"kind is one of {', '.join(KINDS)}; got {kind!r}")
    if seed < 0:
        raise LoadError(f"seed wants an integer of at least 0, got {seed}")
    spec = KINDS[kind]
    rng = np.random.default_rng([seed, sorted(KINDS).index(kind)])
    share = _expert_shares(spec, rng, layers, experts)
    mix, volume = _domain_mix(spec, rng, steps * real_steps_per_record)
    record = slice(real_steps_per_record - 1, None, real_steps_per_record)
    mix, volume = mix[record], volume[record]
    expected = np.einsum("td,dle->tle", mix, share) * (tokens * topk * volume)[:, None, None]
    counts = np.minimum(rng.poisson(expected), np.ceil(tokens * volume)[:, None, None])
    return Trace(counts.astype(np.int32), expected)


def _expert_shares(
    spec: LoadKind, rng: np.random.Generator, layers: int, experts: int
) -> npt.NDArray[np.float64]:
    """float64 [D, L, E]; share of a domain's assignments that each expert gets."""
    if spec.zipf > 0:
        ranks = np.stack([rng.permutation(experts) for _ in range(layers)]) + 1.0
        popularity = -spec.zipf * np.log(ranks)
    else:
        popularity = rng.normal(0.0, spec.popularity_sd, (layers, experts))
    affinity = np.empty((DOMAINS, layers, experts))
    fresh = np.sqrt(1.0 - DEPTH_CORRELATION**2)
    for layer in range(layers):
        noise = rng.normal(0.0, spec.affinity_sd, (DOMAINS, experts))
        affinity[:, layer] = (
            noise if layer == 0 else DEPTH_CORRELATION * affinity[:, layer - 1] + fresh * noise
        )
    logits = popularity[None] + affinity
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _domain_mix(
    spec: LoadKind, rng: np.random.Generator, steps: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Domain weights [steps, D] and the token volume factor [steps]."""
    home = rng.normal(0.0, 0.7, DOMAINS)
    logits, bump = home.copy(), np.zeros(DOMAINS)
    per_step = spec.walk / np.sqrt(10.0)
    mix, volume, level = np.empty((steps, DOMAINS)), np.empty(steps), 0.0
    for t in range(steps):
        logits += spec.revert * (home - logits) + per_step * rng.normal(size=DOMAINS)
        bump *= 0.97
        if rng.random() < spec.burst / 10.0:
            bump[rng.integers(DOMAINS)] += 3.0
        e = np.exp(logits + bump - (logits + bump).max())
        mix[t] = e / e.sum()
        level = 0.99 * level + 0.01 * rng.normal()
        volume[t] = np.exp(level)
    if spec.static:
        mix[:] = 0.0
        mix[:, 0] = 1.0
    return mix, volume
