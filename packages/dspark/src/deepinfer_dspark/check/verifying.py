"""Whether a verify function keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.check.cases import Case, Path, largest
from deepinfer_dspark.check.outcomes import DEPTH, TooManyUniformsError, Uniform, outcomes
from deepinfer_dspark.check.report import Report
from deepinfer_dspark.errors import DsparkError, ShapeError

VerifyOne = Callable[[list[list[float]], list[list[float]], list[int], Uniform], Sequence[int]]
"""verify(p, q, drafts, uniform) -> emitted tokens, of one request.

p: l + 1 target distributions, row k after drafts 0..k-1; q: l draft distributions; drafts: l ids;
uniform: call it for every random number in [0, 1) that is needed.
"""

TOLERANCE = 1e-6


def check_verify(
    verify: VerifyOne,
    *,
    vocab: int = 3,
    gamma: int = 2,
    cases: int = 4,
    seed: int = 0,
    draws: int | None = None,
) -> Report:
    """Enumerate what `verify` emits for every block of drafts of `cases` made-up models, or with
    `draws` count that many rounds of each.

    Enumeration wants the same answer for the same uniforms. Counting tests at a level of 1e-4 over
    all cases together and takes any function.
    """
    if vocab < 2 or gamma < 1 or cases < 1 or (draws is not None and draws < 1000):
        raise ShapeError(
            f"check_verify wants vocab >= 2, gamma, cases >= 1 and draws >= 1000, got {vocab}, "
            f"{gamma}, {cases} and {draws}"
        )
    findings: list[tuple[float, str]] = []
    for i in range(cases):
        case = Case(vocab, gamma, seed + i)
        if draws is None:
            found, of = _enumerated(verify, case), "off by"
            size, cell = largest(found, case.target())
            limit = TOLERANCE
        else:
            size, cell = _counted(
                verify, case, draws, 1e-4 / cases, np.random.default_rng(seed + i)
            )
            of, limit = "chi-square over its limit by", 1.0
        if size > limit:
            findings.append((size, f"case {seed + i}: text {list(cell)} {of} {size:.3g}"))
    findings.sort(reverse=True)
    method = "enumeration" if draws is None else f"{draws} rounds counted"
    method += f", {cases} models of {vocab} tokens and {gamma} drafts"
    return Report(not findings, method, findings[0][0] if findings else 0.0,
                  tuple(text for _, text in findings[:8]))  # fmt: skip


def _play(verify: VerifyOne, case: Case, drafts: Path, uniform: Uniform) -> Path:
    p = [case.p(drafts[:k]) for k in range(case.gamma + 1)]
    q = [case.q(drafts[:k]) for k in range(case.gamma)]
    try:
        tokens = tuple(int(t) for t in verify(p, q, list(drafts), uniform))
    except TooManyUniformsError:
        raise
    except Exception as e:
        raise DsparkError(
            f"the function failed on p={p}, q={q}, drafts={list(drafts)}: {type(e).__name__}: {e}"
        ) from e
    if not 1 <= len(tokens) <= case.gamma + 1 or not all(0 <= t < case.vocab for t in tokens):
        raise DsparkError(
            f"the function emitted {list(tokens)[:9]} for {case.gamma} drafts: want 1 to "
            f"{case.gamma + 1} ids in 0..{case.vocab - 1}"
        )
    return tokens


def _enumerated(verify: VerifyOne, case: Case) -> npt.NDArray[np.float64]:
    out = np.zeros((case.vocab,) * (case.gamma + 1))
    try:
        for drafts, weight in case.paths():
            for tokens, mass in outcomes(lambda u, d=drafts: _play(verify, case, d, u)):
                case.complete(tokens, weight * mass, out)
    except TooManyUniformsError:
        raise DsparkError(
            f"the function asks for more than {DEPTH} uniforms a round: count rounds instead"
        ) from None
    return out


def _counted(
    verify: VerifyOne, case: Case, draws: int, level: float, rng: np.random.Generator
) -> tuple[float, Path]:
    """Chi-square of the first token and of the second given it, over its quantile; worst prefix."""
    paths = case.paths()
    weights = np.array([w for _, w in paths])
    counts: dict[Path, npt.NDArray[np.float64]] = {}
    for at in rng.choice(len(paths), size=draws, p=weights / weights.sum()).tolist():
        tokens = _play(verify, case, paths[at][0], rng.random)
        for k in range(min(len(tokens), 2)):
            counts.setdefault(tokens[:k], np.zeros(case.vocab))[tokens[k]] += 1
    worst: tuple[float, Path] = (0.0, ())
    for prefix, seen in counts.items():
        ratio = chi_square_ratio(seen, np.array(case.p(prefix)), level / len(counts))
        worst = max(worst, (ratio, prefix))
    return worst


def chi_square_ratio(seen: Any, law: Any, level: float) -> float:
    """Chi-square of counts against a law, divided by its quantile at `level`; a token that cannot
    come and came is infinitely wrong. Cells of fewer than five expected are put together."""
    n = float(seen.sum())
    if n < 50:
        return 0.0
    if seen[law <= 0].sum() > 0:
        return float("inf")
    rare = law * n < 5
    expected = np.append(law[~rare] * n, law[rare].sum() * n)
    found = np.append(seen[~rare], seen[rare].sum())
    keep = expected > 0
    cells = int(keep.sum())
    if cells < 2:
        return 0.0
    statistic = float(((found[keep] - expected[keep]) ** 2 / expected[keep]).sum())
    return statistic / chi_square_quantile(cells - 1, level)


def chi_square_quantile(degrees: int, level: float) -> float:
    """Upper quantile by Wilson and Hilferty's cube root, up to a fifth too wide in far tails."""
    from statistics import NormalDist

    z = NormalDist().inv_cdf(1.0 - level)
    a = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - a + z * a**0.5) ** 3 * 1.03
