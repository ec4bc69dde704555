"""Logits in half precision and integers: the distribution is that of the stored numbers.

Temperature, truncation and normalisation are computed in float32 or better. The bound of 2e-6 is
what float32 leaves; bfloat16 arithmetic would be off by 4e-3.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import proofs
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    ShapeError,
    Verifier,
    sample_drafts,
)
from deepinfer_dspark.arrays import to_host
from deepinfer_dspark.backend import backend_of
from deepinfer_dspark.drafting import peak_probability
from deepinfer_dspark.reference import LawSpec, law_of
from deepinfer_dspark.sampling import scale_and_truncate
from deepinfer_dspark.uniforms import CounterRng

stored = proofs.stored

NUMPY = ["float64", "float32", "float16", "int64", "int32"]
TORCH = ["torch.float64", "torch.float32", "torch.float16", "torch.bfloat16", "torch.int64"]
if importlib.util.find_spec("torch") is None:
    TORCH = [pytest.param(t, marks=pytest.mark.skip("torch is not installed")) for t in TORCH]
DTYPES = [*NUMPY, *TORCH]
SPECS = {
    "cool": LawSpec(temperature=0.6),
    "all cuts": LawSpec(temperature=0.8, top_p=0.9, top_k=3, min_p=0.05),
    "penalties": LawSpec(presence=0.3, frequency=0.2, repetition=1.3),
    "bias and ban": LawSpec(temperature=1.3, bias={0: 0.7, 2: -0.4}, banned=(1,)),
    "greedy": LawSpec(temperature=0.0, bias={1: 0.05}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_enumerated_output_is_that_of_the_stored_logits(name: str, dtype: str) -> None:
    toy = proofs.Toy(
        vocab=3, gamma=2, seed=3, target=SPECS[name], output=(0, 1), prompt=(2,), dtype=dtype
    )
    scheduler = BudgetScheduler(proofs.table(), toy.gamma, "causal")
    for budget in (1, 2):
        error = np.abs(proofs.output_law(toy, scheduler, budget, Verifier()) - toy.law()).max()
        assert error < (1e-12 if "64" in dtype else 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_form", ["dense", "sparse", "point"])
def test_two_requests_stay_independent_in_every_dtype(q_form: str, dtype: str) -> None:
    toys = tuple(
        proofs.Toy(vocab=3, gamma=1, seed=s, q_form=q_form, dtype=dtype, target=SPECS["cool"])
        for s in (4, 5)
    )
    scheduler = BudgetScheduler(proofs.table(), 1, "causal")
    joint = proofs.joint_law(toys, scheduler, 1, Verifier())
    assert np.abs(joint - np.outer(*(t.law().ravel() for t in toys))).max() < 2e-6


WORDS = np.array([[24.0, 23.5, 22.75, 22.0, 20.0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drafts", [0, 1])
def test_counted_draws_follow_the_stored_logits(dtype: str, drafts: int) -> None:
    """100,000 draws, chi-square with 4 degrees of freedom below its 1e-4 quantile of 23.5 (each of
    20 cases at 1e-4: 0.2% in all). Arithmetic in bfloat16 gives about 98."""
    logits, R = stored(WORDS, dtype), 100_000
    p = np.array(law_of(to_host(logits)[0].tolist(), LawSpec(temperature=0.7)))
    sampling = SamplingBatch.uniform(R, temperature=0.7, seeds=np.arange(R, dtype=np.uint64))
    proposal = Proposal.empty(R)
    if drafts:
        wide = backend_of(logits).take(logits, np.zeros(R, dtype=np.int64))
        tokens, q = sample_drafts(wide, sampling, np.zeros(R, dtype=np.int64), 0, CounterRng())
        proposal = Proposal(tokens[:, None], np.ones(R, dtype=int), q=q[:, None])
    rows = backend_of(logits).take(logits, np.zeros(R * (1 + drafts), dtype=np.int64))
    out = Verifier().verify(
        rows, np.arange(R + 1) * (1 + drafts), proposal, np.full(R, drafts), sampling
    )
    counts = np.bincount(out.tokens[out.cu_tokens[:-1]], minlength=5)
    assert float(((counts - R * p) ** 2 / (R * p)).sum()) < 23.5


@pytest.mark.parametrize("dtype", ["float16", *TORCH[2:4]])
def test_a_nucleus_of_wide_vocabularies_is_that_of_the_stored_logits(dtype: str) -> None:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(28, 8000)) * 2.5
    x[:, :40] = 9.0 + rng.normal(size=(28, 40)) * 1.5
    half = stored(x, dtype)
    exact = np.asarray(to_host(half), dtype=np.float64)
    sampling = SamplingBatch.uniform(28, temperature=0.7, top_p=0.9)
    at = np.arange(28)
    seen = scale_and_truncate(backend_of(half), half, sampling, at)
    want = scale_and_truncate(backend_of(exact), exact, sampling, at)
    assert (np.isfinite(to_host(seen)) == np.isfinite(want)).all()
    p = np.asarray(to_host(backend_of(seen).probabilities(seen)))
    total = np.abs(p - backend_of(want).probabilities(want)).sum(axis=1) / 2
    assert total.max() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1e-5, 1e-3])
def test_tiny_temperatures_draw_the_most_likely_token(dtype: str, temperature: float) -> None:
    for scale in (1.0, 2000.0):
        logits = stored(np.array([[3.0, 9.0, 7.0]]) * scale, dtype)
        out = Verifier().verify(
            logits,
            [0, 1],
            Proposal.empty(1),
            [0],
            SamplingBatch.uniform(1, temperature=temperature),
        )
        assert out.emitted(0) == [1]
        assert not out.dead.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_logprobs_and_penalties_are_taken_in_float32_or_better(dtype: str) -> None:
    logits = stored(np.array([[24.0, 24.0, 20.0, 10.0]]), dtype)
    exact = np.array([24.0, 24.0, 20.0, 10.0])
    sampling = SamplingBatch(
        temperature=np.ones(1),
        seeds=np.zeros(1, dtype=np.uint64),
        positions=np.zeros(1, dtype=np.int64),
        penalties=Penalties(
            RaggedIds.of([[0]], [[1.0]]), np.full(1, 0.01), np.zeros(1), np.ones(1)
        ),
    )
    counts = np.zeros(4)
    out = Verifier().verify(
        logits, [0, 1], Proposal.empty(1), [0], sampling, np.array([[1, 1, 1, 0]], bool), logprobs=4
    )
    counts[out.final] += 1
    raw = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert out.top_logprobs is not None
    np.testing.assert_allclose(out.top_logprobs[0], raw, atol=1e-5)
    # a penalty of 0.01 beside a logit of 24 is below what bfloat16 can hold
    greedy = SamplingBatch(
        np.zeros(1), sampling.seeds, sampling.positions, penalties=sampling.penalties
    )
    assert Verifier().verify(logits, [0, 1], Proposal.empty(1), [0], greedy).emitted(0) == [1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_confidences_of_drafts_are_those_of_the_stored_logits(dtype: str) -> None:
    logits = stored(WORDS, dtype)
    want = max(law_of(to_host(logits)[0].tolist(), LawSpec()))
    np.testing.assert_allclose(peak_probability(logits), [want], atol=1e-6)


def test_what_is_no_number_is_refused_by_dtype() -> None:
    for bad in (np.zeros((1, 3), dtype=complex), np.zeros((1, 3), dtype=object)):
        with pytest.raises(ShapeError, match="dtype"):
            Verifier().verify(
                bad, [0, 1], Proposal.empty(1), [0], SamplingBatch.uniform(1, temperature=0.5)
            )
