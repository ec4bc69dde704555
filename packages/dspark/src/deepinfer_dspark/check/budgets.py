"""Whether a rule for how many drafts to verify looks only at what it may."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.check.cases import Case, Path, largest
from deepinfer_dspark.check.report import Report
from deepinfer_dspark.errors import DsparkError, ShapeError

Lengths = Callable[[npt.NDArray[np.float64], npt.NDArray[np.float64]], Any]
"""lengths(older, conf) -> drafts to verify of each request, int [R], entries 0..gamma.

older: float [R, gamma], confidences of an earlier round; conf: float [R, gamma], of the drafts at
hand: conf[r, k] estimates that draft k survives and has seen drafts before k, never k itself.
"""

TOLERANCE = 1e-9


def check_budget(
    lengths: Lengths, *, vocab: int = 2, gamma: int = 2, cases: int = 12, seed: int = 0
) -> Report:
    """Enumerate the joint distribution of two requests that share the rule's budget, and that of
    each alone.

    Verification itself is taken to be right. Where the distribution is not the target's, findings
    name a request whose draft k was admitted or not because of confidences behind k, if that is
    the leak: those are functions of draft k.
    """
    if vocab < 2 or gamma < 1 or cases < 1 or vocab**gamma > 64:
        raise ShapeError(
            f"check_budget wants vocab >= 2, gamma >= 1, cases >= 1 and at most 64 blocks of "
            f"drafts, got {vocab}, {gamma} and {cases}"
        )
    findings: list[tuple[float, str]] = []
    rng = np.random.default_rng(seed)
    for i in range(cases):
        pair = Case(vocab, gamma, 2 * (seed + i)), Case(vocab, gamma, 2 * (seed + i) + 1)
        older = rng.random((2, gamma))
        size, cell = largest(_joint(lengths, pair, older), _target(pair))
        for one in pair:  # alone as well: steps of few tokens are priced differently
            alone, text = largest(_alone(lengths, one, older[:1]), one.target())
            if alone > TOLERANCE:
                findings.append((alone, f"case {seed + i}: text {list(text)} off by {alone:.3g}"))
        if size > TOLERANCE:
            texts = _texts(cell, pair[0])
            findings.append((size, f"case {seed + i}: texts {texts} off by {size:.3g}"))
    findings.sort(reverse=True)
    told = [text for _, text in findings[:4]]
    if findings:
        told += _anticipates(lengths, gamma, rng)
    return Report(
        not findings,
        f"joint enumeration of one and two requests, {cases} models of {vocab} tokens and "
        f"{gamma} drafts",
        findings[0][0] if findings else 0.0,
        tuple(told),
    )


def _lens(lengths: Lengths, older: Any, conf: Any) -> tuple[int, ...]:
    try:
        found = np.asarray(lengths(older.copy(), conf.copy()))
    except Exception as e:
        raise DsparkError(
            f"the rule failed on older={older.tolist()}, conf={conf.tolist()}: "
            f"{type(e).__name__}: {e}"
        ) from e
    R, gamma = conf.shape
    whole = found.shape == (R,) and found.dtype.kind in "iu"
    if not whole or not ((found >= 0) & (found <= gamma)).all():
        raise DsparkError(
            f"the rule returned {found!r} for {R} requests: want int [{R}] in 0..{gamma}"
        )
    return tuple(int(n) for n in found)


def _joint(
    lengths: Lengths, pair: tuple[Case, Case], older: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    laws: dict[tuple[int, Path, int], npt.NDArray[np.float64]] = {}

    def law(i: int, drafts: Path, length: int) -> npt.NDArray[np.float64]:
        key = i, drafts, length
        if key not in laws:
            laws[key] = pair[i].verified(drafts, length).ravel()
        return laws[key]

    size = pair[0].vocab ** (pair[0].gamma + 1)
    total = np.zeros((size, size))
    for (a, wa), (b, wb) in itertools.product(pair[0].paths(), pair[1].paths()):
        conf = np.array([[c.conf(x[:k]) for k in range(c.gamma)]
                         for c, x in zip(pair, (a, b), strict=True)])  # fmt: skip
        lens = _lens(lengths, older, conf)
        total += wa * wb * np.outer(law(0, a, lens[0]), law(1, b, lens[1]))
    return total


def _alone(lengths: Lengths, case: Case, older: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = np.zeros((case.vocab,) * (case.gamma + 1))
    for drafts, weight in case.paths():
        conf = np.array([[case.conf(drafts[:k]) for k in range(case.gamma)]])
        total += weight * case.verified(drafts, _lens(lengths, older, conf)[0])
    return total


def _target(pair: tuple[Case, Case]) -> npt.NDArray[np.float64]:
    return np.outer(pair[0].target().ravel(), pair[1].target().ravel())


def _texts(cell: Path, case: Case) -> str:
    shape = (case.vocab,) * (case.gamma + 1)
    return " and ".join(str([int(t) for t in np.unravel_index(c, shape)]) for c in cell)


def _anticipates(lengths: Lengths, gamma: int, rng: np.random.Generator) -> list[str]:
    """An example in which later confidences decide on an earlier draft, if one is found."""
    for _ in range(2000):
        R = int(rng.integers(1, 3))
        older, conf = rng.random((R, gamma)), np.round(rng.random((R, gamma)), 1)
        k = int(rng.integers(gamma))
        other = conf.copy()
        other[0, k + 1 :] = np.round(rng.random(gamma - k - 1), 1)
        before, after = (_lens(lengths, older, c)[0] > k for c in (conf, other))
        if before != after:
            return [
                f"draft {k} of a request is {'in' if before else 'out'} with confidences "
                f"{conf[0].tolist()} and {'in' if after else 'out'} with {other[0].tolist()}: what "
                f"stands behind position {k} depends on that draft"
            ]
    return []
