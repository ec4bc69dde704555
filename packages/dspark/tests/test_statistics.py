"""The law of the output by counting. Fixed seeds; alpha is 1e-4 for all cases of a test together
(Bonferroni), so one run in ten thousand would fail by chance if the seeds were drawn anew.

Power: a two-cell z-test at 1e-4 finds a shift d of a cell of probability p with probability 0.999
once N = 6.98^2 p (1 - p) / d^2. Here N = 1e6: 0.0032 at p = 0.3, 0.0007 at p = 0.01.
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    Proposal,
    SamplingBatch,
    SparseQ,
    StepTable,
    Verifier,
)
from deepinfer_dspark.reference import LawSpec, law_of

stats = pytest.importorskip("scipy.stats")
ALPHA = 1e-4
CASES = {
    "plain": (LawSpec(), "dense"),
    "cool, cut": (LawSpec(temperature=0.7, top_p=0.9), "dense"),
    "sparse q": (LawSpec(), "sparse"),
}


def draws(rng, laws: np.ndarray) -> np.ndarray:
    """One token of each row of laws [n, V]."""
    cdf = np.cumsum(laws, axis=1)
    return (rng.random((laws.shape[0], 1)) * cdf[:, -1:] > cdf).sum(axis=1)


def laws_of(logits: np.ndarray, spec: LawSpec) -> np.ndarray:
    flat = [law_of(row.tolist(), spec) for row in logits.reshape(-1, logits.shape[-1])]
    return np.array(flat).reshape(logits.shape)


def three_tokens(case: str, n: int, chunk: int = 250_000) -> tuple[np.ndarray, np.ndarray]:
    """Counts [216] of the first three tokens after n rounds of two drafts, and their law."""
    spec, form = CASES[case]
    V = 6
    rng = np.random.default_rng(3)
    x1, x2, x3 = rng.normal(size=V), rng.normal(size=(V, V)), rng.normal(size=(V, V, V))
    p1, p2, p3 = (laws_of(x, spec) for x in (x1, x2, x3))
    q1, q2 = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V), size=V)
    if form == "sparse":  # the two least likely tokens of each row are never drafted
        for q in (q1[None], q2):
            np.put_along_axis(q, np.argsort(q, axis=1)[:, :2], 0.0, axis=1)
            q /= q.sum(axis=1, keepdims=True)
    counts = np.zeros(V**3)
    for start in range(0, n, chunk):
        a = draws(rng, np.tile(q1, (chunk, 1)))
        b = draws(rng, q2[a])
        logits = np.stack([np.tile(x1, (chunk, 1)), x2[a], x3[a, b]], axis=1).reshape(-1, V)
        q: object = np.stack([np.tile(q1, (chunk, 1)), q2[a]], axis=1)
        if form == "sparse":
            ids = np.argsort(-q, axis=2)[:, :, : V - 2]
            q = SparseQ(ids, np.take_along_axis(q, ids, axis=2))
        params = SamplingBatch.uniform(
            chunk, temperature=spec.temperature, top_p=spec.top_p,
            seeds=np.arange(start, start + chunk, dtype=np.uint64),
        )  # fmt: skip
        lens = np.full(chunk, 2)
        drafts = np.stack([a, b], axis=1)
        out = Verifier().verify(
            logits, np.arange(chunk + 1) * 3, Proposal(drafts, lens, q=q), lens, params
        )
        count = np.diff(out.cu_tokens)
        tokens = np.full((chunk, 3), -1)
        tokens[np.arange(3)[None, :] < count[:, None]] = out.tokens
        # where the round emitted fewer, the next round's law completes them
        at = np.flatnonzero(tokens[:, 1] < 0)
        tokens[at, 1] = draws(rng, p2[tokens[at, 0]])
        at = np.flatnonzero(tokens[:, 2] < 0)
        tokens[at, 2] = draws(rng, p3[tokens[at, 0], tokens[at, 1]])
        counts += np.bincount(tokens @ [V * V, V, 1], minlength=V**3)
    return counts, (p1[:, None, None] * p2[:, :, None] * p3).ravel()


@pytest.mark.parametrize("case", CASES)
def test_joint_law_of_three_tokens_by_counting_a_million_rounds(case: str) -> None:
    n = 1_000_000
    counts, law = three_tokens(case, n)
    possible = law > 0
    assert counts[~possible].sum() == 0
    expected = n * law[possible]
    chi = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(chi, int(possible.sum()) - 1) > ALPHA / len(CASES)
    distance = 0.5 * np.abs(counts / n - law).sum()
    assert distance <= 0.5 * np.sqrt(law * (1 - law) / n).sum() * 1.3


PAIRS = 40_000


def competing_pairs(choose) -> tuple[np.ndarray, np.ndarray]:
    """First two tokens of two requests that compete for two slots, PAIRS times: ids [PAIRS, 2]
    over 9 outcomes, and the law [9] of one request."""
    V, gamma = 3, 2
    rng = np.random.default_rng(5)
    x = rng.normal(size=(1 + V + V * V, V))  # logits after (), (a), (a, b)
    p = laws_of(x, LawSpec())
    q = rng.dirichlet(np.ones(V), size=1 + V)
    first = draws(rng, np.tile(q[0], (2 * PAIRS, 1)))
    second = draws(rng, q[1 + first])
    # the confidence of the second draft depends on the first, as a confidence head's does
    conf = np.stack([np.full(2 * PAIRS, 0.3), np.array([0.95, 0.1, 0.6])[first]], axis=1)
    lens = np.concatenate([choose(pair) for pair in conf.reshape(PAIRS, 2, gamma)])
    cu = np.concatenate([[0], np.cumsum(lens + 1)])
    after = np.stack([np.zeros_like(first), 1 + first, 1 + V + first * V + second], axis=1)
    inside = np.arange(gamma + 1)[None, :] <= lens[:, None]
    out = Verifier().verify(
        x[after[inside]], cu,
        Proposal(np.stack([first, second], 1), np.full(2 * PAIRS, gamma),
                 q=np.stack([np.tile(q[0], (2 * PAIRS, 1)), q[1 + first]], axis=1)),
        lens, SamplingBatch.uniform(2 * PAIRS),
    )  # fmt: skip
    start, count = out.cu_tokens[:-1], np.diff(out.cu_tokens)
    one = out.tokens[start]
    two = np.where(
        count > 1, out.tokens[np.minimum(start + 1, out.tokens.size - 1)], draws(rng, p[1 + one])
    )
    law = (p[0][:, None] * p[1 : 1 + V]).ravel()
    return (one * V + two).reshape(PAIRS, 2), law


def independence(pairs: np.ndarray) -> float:
    joint = np.zeros((9, 9))
    np.add.at(joint, (pairs[:, 0], pairs[:, 1]), 1)
    return float(stats.chi2_contingency(joint).pvalue)


def fits(pairs: np.ndarray, law: np.ndarray) -> float:
    counts = np.bincount(pairs.ravel(), minlength=law.size)
    return float(stats.chisquare(counts, law * pairs.size).pvalue)


def test_two_requests_competing_for_one_budget_are_independent() -> None:
    """Chi-square of (Y1, Y2) with 64 degrees of freedom, and of either against its law with 8."""
    scheduler = BudgetScheduler(StepTable.linear(1.0, 0.1, grid=1), 2, "causal")
    pairs, law = competing_pairs(lambda conf: scheduler.allocate(2, conf))
    assert independence(pairs) > ALPHA / 2
    assert fits(pairs, law) > ALPHA / 2


def test_the_same_counts_find_an_allocation_that_leaks() -> None:
    """Counting winners of a score that may rise lets a draft decide on itself: the test above has
    the power to see that."""

    def winners(conf):
        flat = conf.ravel()
        won = np.zeros(flat.size, dtype=bool)
        won[np.argsort(-flat, kind="stable")[:2]] = True
        return won.reshape(conf.shape).sum(axis=1)

    pairs, law = competing_pairs(winners)
    assert min(independence(pairs), fits(pairs, law)) < 1e-12
