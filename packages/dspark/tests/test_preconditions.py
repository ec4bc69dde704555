"""A draft that its own q cannot have produced harms nobody: its place is drawn anew."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from deepinfer_dspark import Proposal, SamplingBatch, ShapeError, SparseQ, Verifier

V = 6
KINDS = ["numpy"]
if importlib.util.find_spec("torch") is not None:
    KINDS.append("torch")


def given(x, kind: str):
    if kind == "numpy":
        return x
    import torch

    return torch.from_numpy(np.array(x))


def laws() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V))


def first_tokens(p, proposal, n: int, kind: str = "numpy"):
    logits = np.broadcast_to(np.log(p), (2 * n, V)).copy()
    out = Verifier().verify(
        given(logits, kind),
        np.arange(n + 1) * 2,
        proposal,
        np.ones(n, int),
        SamplingBatch.uniform(n, seeds=np.arange(n, dtype=np.uint64)),
    )
    return out, out.tokens[out.cu_tokens[:-1]]


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    n = tokens.size
    return float(((np.bincount(tokens, minlength=V) - n * p) ** 2 / (n * p)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_tokens_drawn_from_more_than_the_reported_q_leave_the_target_distribution(
    form: str, kind: str
) -> None:
    """200,000 rounds; 5 degrees of freedom, 25.7 is the 1e-4 quantile. Accepting these drafts gave
    a token of probability .005 in .209 of the rounds."""
    p, q = laws()
    n = 200_000
    tokens = np.random.default_rng(1).choice(V, p=q, size=n)[:, None]
    top = np.argsort(-q)[:2]
    kept = q[top] / q[top].sum()
    if form == "sparse":
        law = SparseQ(
            np.broadcast_to(top, (n, 1, 2)).copy(),
            given(np.broadcast_to(kept, (n, 1, 2)).copy(), kind),
        )
    else:
        row = np.zeros(V)
        row[top] = kept
        law = given(np.broadcast_to(row, (n, 1, V)).copy(), kind)
    out, first = first_tokens(p, Proposal(tokens, np.ones(n, int), q=law), n, kind)
    assert chi_square(first, p) < 25.7
    assert np.array_equal(out.invalid, ~np.isin(tokens[:, 0], top))
    assert np.isnan(out.accept_prob[out.invalid]).all()
    assert (out.judged[out.invalid] == 0).all()


BROKEN = {
    "a q that is not a number": np.full(V, np.nan),
    "a q with one entry that is not a number": np.array([0.5, 0.5, 0.0, 0.0, 0.0, np.nan]),
    "a q that sums to a half": np.full(V, 0.5 / V),
    "a q that sums to two": np.full(V, 2.0 / V),
    "a q of logits": np.array([2.0, 1.0, 0.5, -1.0, -2.0, 0.3]),
    "a negative q": np.array([1.5, -0.5, 0.0, 0.0, 0.0, 0.0]),
    "an infinite q": np.array([np.inf, 0.0, 0.0, 0.0, 0.0, 0.0]),
    "an empty q": np.zeros(V),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_q_costs_its_own_request_its_drafts_and_nobody_else_anything(
    name: str, kind: str
) -> None:
    p, q = laws()
    n = 10_000
    rng = np.random.default_rng(2)
    tokens = rng.choice(V, p=q, size=n)[:, None]
    law = np.broadcast_to(q, (n, 1, V)).copy()
    broken = np.arange(n) % 2 == 0
    alone, _ = first_tokens(p, Proposal(tokens, np.ones(n, int), q=given(law, kind)), n, kind)
    law[broken] = BROKEN[name]
    tokens = np.where(broken[:, None], 0, tokens)  # always the same draft: nothing to trust
    out, first = first_tokens(p, Proposal(tokens, np.ones(n, int), q=given(law, kind)), n, kind)
    assert np.array_equal(out.invalid, broken)
    assert chi_square(first[broken], p) < 25.7
    for r in range(1, 200, 2):
        assert out.emitted(r) == alone.emitted(r)
    assert not out.dead.any()


@pytest.mark.parametrize("bad_at", [0, 1, 2])
def test_drafts_before_the_broken_one_are_judged_as_usual(bad_at: int) -> None:
    p = np.array([0.25] * 4)
    q = np.zeros((1, 3, 4))
    q[0, :, 1] = 1.0
    q[0, bad_at] = [0.5, 0.0, 0.5, 0.0]  # the draft, 1, is not in it
    logits = np.log(np.broadcast_to([1e-9, 1.0, 1e-9, 1e-9], (4, 4)))
    out = Verifier().verify(
        logits, [0, 4], Proposal(np.array([[1, 1, 1]]), np.array([3]), q=q), [3],
        SamplingBatch.uniform(1),
    )  # fmt: skip
    assert out.n_accepted.tolist() == [bad_at]
    assert out.judged.tolist() == [bad_at]
    assert out.emitted(0) == [1] * (bad_at + 1)  # drawn from the target, which wants 1 as well
    assert out.invalid.tolist() == [True]
    assert out.keep.tolist() == [bad_at + 1]
    assert p.sum() == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token", [-1, 6, 10**9])
@pytest.mark.parametrize("form", ["point", "dense", "sparse"])
def test_ids_the_target_does_not_have_are_never_emitted(
    form: str, token: int, temperature: float
) -> None:
    q = None
    if form == "dense":
        q = np.full((2, 1, V), 1 / V)
    if form == "sparse":
        q = SparseQ(np.full((2, 1, 1), token), np.ones((2, 1, 1)))
        q.ids[1] = 3
    out = Verifier().verify(
        np.log(np.full((4, V), 1 / V)), [0, 2, 4],
        Proposal(np.array([[token], [3]]), np.ones(2, int), q=q), [1, 1],
        SamplingBatch.uniform(2, temperature=temperature),
    )  # fmt: skip
    assert out.n_accepted[0] == 0
    assert 0 <= out.emitted(0)[0] < V
    assert all(0 <= t < V for t in out.emitted(1))
    assert not out.invalid[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [4, 9])
def test_a_draft_vocabulary_of_another_width_is_lossless(width: int, kind: str) -> None:
    """Padded ids take part of the drafter's probability; a narrow drafter never says the rest."""
    p, _ = laws()
    q = np.random.default_rng(3).dirichlet(np.ones(width))
    n = 100_000
    tokens = np.random.default_rng(4).choice(width, p=q, size=n)[:, None]
    law = given(np.broadcast_to(q, (n, 1, width)).copy(), kind)
    out, first = first_tokens(p, Proposal(tokens, np.ones(n, int), q=law), n, kind)
    assert chi_square(first, p) < 25.7
    assert not out.invalid.any()


def test_float32_rounding_of_a_wide_vocabulary_is_no_fault() -> None:
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(3, 1, 120_000)) * 3).astype(np.float32)
    e = np.exp(logits - logits.max(axis=2, keepdims=True))
    q = (e / e.sum(axis=2, keepdims=True)).astype(np.float32)
    out = Verifier().verify(
        np.zeros((6, 120_000), dtype=np.float32), [0, 2, 4, 6],
        Proposal(np.array([[5], [6], [7]]), np.ones(3, int), q=q), [1, 1, 1],
        SamplingBatch.uniform(3),
    )  # fmt: skip
    assert not out.invalid.any()


def test_a_q_rounded_to_half_precision_is_refused_where_it_is_made() -> None:
    for make in (
        lambda: Proposal(np.zeros((1, 1), int), np.ones(1, int), q=np.ones((1, 1, 2), np.float16)),
        lambda: SparseQ(np.zeros((1, 1, 1), int), np.ones((1, 1, 1), np.float16)),
    ):
        with pytest.raises(ShapeError, match="float32 or float64"):
            make()
