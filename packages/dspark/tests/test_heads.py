"""Short ways over large vocabularies, beside the numpy backend that sorts and draws everything."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deepinfer_dspark.backend import NumpyBackend  # noqa: E402
from deepinfer_dspark.backend_torch import FAR, FAR_BITS, HEADS, TorchBackend  # noqa: E402

VOCAB = 4 * HEADS[-1] + 100
PLAIN, FAST = NumpyBackend(), TorchBackend()


def laws(seed: int) -> dict[str, np.ndarray]:
    """Rows that end in each of the ways, and those that break one."""
    draw = np.random.default_rng(seed)
    ranks = np.log1p(np.arange(VOCAB))
    ties = np.round(draw.normal(size=VOCAB) * 2)
    masked = np.full(VOCAB, -np.inf)
    masked[draw.integers(0, VOCAB, 3)] = draw.normal(size=3)
    one, none, broken = np.full((3, VOCAB), -np.inf)
    one[7] = 1.5
    broken[:] = draw.normal(size=VOCAB)
    broken[5] = np.nan
    return {
        "steep": -2.0 * draw.permutation(ranks),  # the first head holds the nucleus
        "middle": -1.05 * draw.permutation(ranks),  # the second
        "flat": draw.normal(size=VOCAB) * 0.1,  # neither
        "ties": ties,
        "equal": np.zeros(VOCAB),
        "masked": masked,
        "one": one,
        "none": none,
        "broken": broken,
    }


def rows(seed: int) -> np.ndarray:
    return np.stack(list(laws(seed).values())).astype(np.float32)


CUTS = {
    "top_p": (0.9, VOCAB, 0.0),
    "narrow": (0.1, VOCAB, 0.0),
    "top_k": (1.0, 40, 0.0),
    "wide_k": (1.0, HEADS[0] + 3, 0.0),
    "min_p": (1.0, VOCAB, 0.02),
    "all": (0.95, 500, 0.001),
    "off": (1.0, VOCAB, 0.0),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_kept_is_what_sorting_keeps(seed: int, cut: str) -> None:
    x, (top_p, top_k, min_p) = rows(seed), CUTS[cut]
    n = len(x)
    bounds = np.full(n, top_p), np.full(n, top_k), np.full(n, min_p)
    with np.errstate(invalid="ignore"):
        wanted = PLAIN.truncate(x, *bounds)
    got = FAST.truncate(torch.from_numpy(x), *bounds).numpy()
    for name, one, other in zip(laws(seed), wanted, got, strict=True):
        if name == "broken":  # of such a row only that it is dead is promised
            continue
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("seed", range(40))
def test_the_noisy_choice_is_that_of_noise_on_every_entry(seed: int) -> None:
    x = rows(seed % 5)
    seeds = np.full(len(x), seed, dtype=np.uint64)
    positions = np.arange(len(x)) + 100 * seed
    with np.errstate(invalid="ignore"):
        ids, alive = PLAIN.coupled_argmax(x, seeds, positions)
    got, there = FAST.coupled_argmax(torch.from_numpy(x), seeds, positions)
    assert np.array_equal(there, alive)
    assert np.array_equal(got[alive], ids[alive])
    # A batch of truncated laws takes another way than one of whole laws.
    for part in (slice(0, 5), slice(5, 8)):
        some, _ = FAST.coupled_argmax(torch.from_numpy(x[part]), seeds[part], positions[part])
        assert np.array_equal(some[alive[part]], ids[part][alive[part]])


def test_noise_above_the_bound_has_the_bits_for_it() -> None:
    def noise(bits: int) -> float:
        return float(-np.log(-np.log((bits + 0.5) * 2.0**-53)))

    assert noise(FAR_BITS) < FAR < noise(FAR_BITS + 4096)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_most_likely_are_those_of_sorting(k: int) -> None:
    x = rows(3)[:-1]
    ids, values = PLAIN.top(x, k)
    got, those = FAST.top(torch.from_numpy(x), k)
    assert np.array_equal(those, values)
    finite = np.isfinite(values)
    assert np.array_equal(got[finite], ids[finite])
