"""Counter-based randomness: every draw is a pure function of (purpose, seed, position).

There is no state, so results depend neither on the batch nor on the order of the rows, and a
request can be preempted, moved or replayed. The mixer is the 64-bit finaliser of SplitMix64
(Steele, Lea, Flood 2014), applied once per key word.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

Purpose = Literal["draft", "accept", "residual", "bonus", "sample"]

_SALT: Final[dict[str, int]] = {
    "draft": 0x9E3779B97F4A7C15,
    "accept": 0xD1B54A32D192ED03,
    "residual": 0x8CB92BA72F3D8DD7,
    "bonus": 0xAAAAAAAB55555555,
    "sample": 0xC2B2AE3D27D4EB4F,
    "gumbel": 0x165667B19E3779F9,
}
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)

OFFSETS_PER_ROUND: Final = 1 << 12
"""Draft offsets a round can hold before two rounds would share a key."""


class Uniforms(Protocol):
    """What verification asks of a source of randomness."""

    def __call__(
        self, purpose: Purpose, seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """Uniforms in [0, 1), independent over purposes, seeds and positions.

        seeds, positions: broadcastable; returns float64 of the broadcast shape.
        """
        ...


def mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 finaliser, elementwise, wrapping arithmetic."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def counter_bits(purpose: str, seeds: Any, positions: Any) -> npt.NDArray[np.uint64]:
    """64 random bits for every (seed, position) of the broadcast of both arrays."""
    key = np.asarray(seeds).astype(np.uint64, copy=False)
    pos = np.asarray(positions).astype(np.int64, copy=False).view(np.uint64)
    with np.errstate(over="ignore"):  # numpy warns on scalars that wrap; wrapping is the point
        mixed = mix64(np.atleast_1d(key + np.uint64(_SALT[purpose])))
        bits = mix64(mixed + np.atleast_1d(pos + np.uint64(1)) * _GOLDEN)
    shape = np.broadcast_shapes(key.shape, pos.shape)
    return bits.reshape(shape)


class CounterRng:
    """The package's `Uniforms`: 53-bit uniforms from `counter_bits`."""

    def __call__(self, purpose: Purpose, seeds: Any, positions: Any) -> npt.NDArray[np.float64]:
        """float64 in [0, 1) of the broadcast shape of `seeds` and `positions`."""
        bits = counter_bits(purpose, seeds, positions)
        return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gumbel_noise(seeds: Any, positions: Any, vocab: int) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise g(seed, position, token id), float64 [n, vocab].

    seeds, positions: [n]. Coupled verification adds the same noise to the logits of the draft
    and of the target, which makes the emitted token a function of (prompt, parameters, seed).
    """
    base = counter_bits("gumbel", np.asarray(seeds), np.asarray(positions))[:, None]
    ids = np.arange(vocab, dtype=np.uint64)[None, :]
    with np.errstate(over="ignore"):
        bits = mix64(base + (ids + np.uint64(1)) * _GOLDEN)
    # the half step keeps u strictly inside (0, 1), so both logarithms are finite
    u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(u))


def draft_key(rounds: Any, offset: Any) -> npt.NDArray[np.int64]:
    """Key of draft noise: (round, offset), not the position.

    A position that is drafted again in a later round must get fresh noise, because confidences
    computed from the older noise may have set the budget that decides whether it is verified.
    """
    return np.asarray(rounds, dtype=np.int64) * OFFSETS_PER_ROUND + np.asarray(
        offset, dtype=np.int64
    )
