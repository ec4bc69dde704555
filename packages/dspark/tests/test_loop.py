"""Generation with drafters: identical greedy text, honest statistics, independent requests."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    Calibrator,
    CounterRng,
    DraftBatch,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    ShapeError,
    StepTable,
    Verifier,
)
from deepinfer_dspark.drafters.mixed import DraftModelDrafter, MixedDrafter
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.loop import SpecLoop


def load(name: str):
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


toy = load("toymodel")
MODEL = toy.ToyModel()
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 8], [9, 9, 9]]
NEW = 14


def drafters(gamma: int = 3):
    near = toy.ToyCausal(toy.ToyModel(seed=0, sharpness=2.0))
    far = toy.ToyCausal(toy.ToyModel(seed=3))
    return {
        "none": None,
        "n-gram": NGramDrafter(gamma, n_min=1, n_max=3),
        "good model": DraftModelDrafter(near, gamma),
        "bad model": DraftModelDrafter(far, gamma),
        "sparse model": DraftModelDrafter(near, gamma, sparse=3),
        "mixed": MixedDrafter(NGramDrafter(gamma, n_min=1), DraftModelDrafter(near, gamma)),
        "mixed sparse": MixedDrafter(
            NGramDrafter(gamma, n_min=1), DraftModelDrafter(near, gamma, sparse=3)
        ),
    }


def scheduler(mode: str | None, gamma: int = 3) -> BudgetScheduler | None:
    if mode is None:
        return None
    table = StepTable(tuple(range(1, 30)), tuple(1.0 + 0.15 * i for i in range(29)))
    return BudgetScheduler(table, gamma, mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [None, "causal", "exact", "uniform", "threshold", "fixed"])
@pytest.mark.parametrize("name", drafters())
def test_greedy_text_is_that_of_plain_decoding(name: str, mode: str | None) -> None:
    loop = SpecLoop(drafters()[name], toy.ToyTarget(MODEL), scheduler(mode))
    made = loop.generate(PROMPTS, SamplingBatch.greedy(4), NEW)
    assert made.tokens == [toy.plain(MODEL, p, NEW) for p in PROMPTS]
    assert made.rows == made.verified + sum(r.verified.size for r in made.results)


def test_a_good_drafter_needs_fewer_passes_of_the_target() -> None:
    def run(name):
        return SpecLoop(drafters()[name], toy.ToyTarget(MODEL)).generate(
            PROMPTS, SamplingBatch.greedy(4), NEW
        )

    assert run("none").tokens_per_pass == 1.0
    assert run("good model").tokens_per_pass > 2.0
    assert run("good model").rounds < run("none").rounds


def test_sampled_text_is_reproducible_and_coupled_text_is_the_same_with_every_drafter() -> None:
    params = SamplingBatch.uniform(4, temperature=0.9, top_p=0.95)
    coupled = replace(params, coupled=np.ones(4, dtype=bool))
    texts = []
    for name in ("none", "n-gram", "good model", "bad model"):
        loop = SpecLoop(drafters()[name], toy.ToyTarget(MODEL), scheduler("causal"))
        texts.append(loop.generate(PROMPTS, coupled, NEW).tokens)
        again = SpecLoop(drafters()[name], toy.ToyTarget(MODEL), scheduler("causal"))
        assert again.generate(PROMPTS, coupled, NEW).tokens == texts[-1]
    assert all(t == texts[0] for t in texts)
    plain = SpecLoop(drafters()["good model"], toy.ToyTarget(MODEL))
    assert (
        plain.generate(PROMPTS, params, NEW).tokens
        == SpecLoop(drafters()["good model"], toy.ToyTarget(MODEL))
        .generate(PROMPTS, params, NEW)
        .tokens
    )


def test_coupled_drafts_are_accepted_more_often_than_chance() -> None:
    params = replace(SamplingBatch.uniform(4, temperature=0.9), coupled=np.ones(4, dtype=bool))
    made = SpecLoop(drafters()["good model"], toy.ToyTarget(MODEL)).generate(PROMPTS, params, 30)
    assert made.accepted / made.verified > 0.4


def test_eos_ends_a_request_and_its_text_ends_with_it() -> None:
    plain = toy.plain(MODEL, PROMPTS[0], NEW)
    eos = plain[4]
    cut = plain[: plain.index(eos) + 1]
    params = replace(SamplingBatch.greedy(1), eos_ids=(eos,))
    for name in ("none", "good model"):
        made = SpecLoop(drafters()[name], toy.ToyTarget(MODEL)).generate(PROMPTS[:1], params, NEW)
        assert made.tokens == [cut]


def test_penalties_count_what_was_generated() -> None:
    params = replace(
        SamplingBatch.greedy(4),
        penalties=Penalties(
            RaggedIds.of([[]] * 4, [[]] * 4), np.full(4, 40.0), np.zeros(4), np.ones(4)
        ),
    )
    texts = [
        SpecLoop(drafters()[name], toy.ToyTarget(MODEL)).generate(PROMPTS, params, 8).tokens
        for name in ("none", "good model", "n-gram")
    ]
    assert texts[0] == texts[1] == texts[2]
    assert all(len(set(t)) == 8 for t in texts[0])  # so strong that nothing repeats


def batch_of(texts, request_ids=None) -> DraftBatch:
    n = len(texts)
    return DraftBatch(
        list(range(n)) if request_ids is None else request_ids,
        np.array([t[-1] for t in texts]),
        np.array([len(t) - 1 for t in texts]),
        texts,
        SamplingBatch.greedy(n),
        np.zeros(n, dtype=np.int64),
    )


def slow_lookup(text, n_max, n_min, gamma):
    for n in range(n_max, n_min - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if n <= len(text) and text[end - n : end] == text[-n:]:
                out = list(text)
                for i in range(gamma):
                    out.append(out[end + i])
                return out[len(text) :]
    return None


@pytest.mark.parametrize("seed", range(8))
def test_n_gram_drafts_are_those_of_a_plain_scan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drafter, text = NGramDrafter(4, n_min=1, n_max=3), rng.integers(0, 4, 3).tolist()
    for _ in range(60):
        proposal = drafter.propose(batch_of([text]), CounterRng())
        expected = slow_lookup(text, 3, 1, 4)
        assert proposal.lengths[0] == (0 if expected is None else 4)
        if expected is not None:
            assert proposal.tokens[0].tolist() == expected
        text = text + rng.integers(0, 4, int(rng.integers(1, 4))).tolist()


def test_n_gram_state_can_be_forked_and_reset() -> None:
    drafter = NGramDrafter(2, n_min=1)
    drafter.propose(batch_of([[1, 2, 3]], ["a"]), CounterRng())
    drafter.fork("a", "b")
    assert drafter.propose(batch_of([[1, 2, 3, 1]], ["b"]), CounterRng()).tokens[0, 0] == 2
    drafter.reset("b")
    assert drafter.propose(batch_of([[7, 8]], ["b"]), CounterRng()).lengths[0] == 0


def test_n_gram_confidence_follows_acceptance() -> None:
    drafter = NGramDrafter(3, n_min=1, n_max=3, ewma=0.2)
    SpecLoop(drafter, toy.ToyTarget(MODEL)).generate(PROMPTS, SamplingBatch.greedy(4), 60)
    conf = drafter.propose(batch_of([[1, 2, 3, 1, 2, 3]]), CounterRng()).conf
    assert conf is not None
    assert conf[0, 0] != 0.5


def test_mixed_learns_to_leave_a_useless_drafter() -> None:
    class Liar(NGramDrafter):
        def propose(self, batch, rng):
            out = super().propose(batch, rng)
            out.tokens[:] = 11
            out.lengths[:] = self.max_tokens
            return out

    good = DraftModelDrafter(toy.ToyCausal(MODEL), 3)
    mixed = MixedDrafter(Liar(3), good, ewma=0.5)
    made = SpecLoop(mixed, toy.ToyTarget(MODEL)).generate(PROMPTS, SamplingBatch.greedy(4), 40)
    assert made.tokens_per_pass > 2.5


@pytest.mark.parametrize(
    "build",
    [
        lambda: NGramDrafter(3, n_min=3, n_max=2),
        lambda: NGramDrafter(0),
        lambda: MixedDrafter(NGramDrafter(2), NGramDrafter(3)),
    ],
)
def test_impossible_drafters_are_refused(build) -> None:
    with pytest.raises(ShapeError):
        build()


@pytest.mark.parametrize(
    ("prompts", "requests", "new"), [([[1], []], 2, 4), ([[1]], 2, 4), ([[1]], 1, 0)]
)
def test_generate_names_what_does_not_fit(prompts, requests: int, new: int) -> None:
    loop = SpecLoop(None, toy.ToyTarget(MODEL))
    with pytest.raises(ShapeError, match="generate wants"):
        loop.generate(prompts, SamplingBatch.greedy(requests), new)


def test_no_requests_are_a_legal_batch() -> None:
    made = SpecLoop(NGramDrafter(2), toy.ToyTarget(MODEL))
    assert made.generate([], SamplingBatch.greedy(0), 4).tokens == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"history": [[1]]}, "1 histories"),
        ({"anchors": np.zeros(3, dtype=int)}, "anchors of shape"),
        ({"rounds": np.zeros((2, 1), dtype=int)}, "rounds of shape"),
        ({"features": np.zeros((3, 4))}, "together"),
        ({"features": np.zeros((3, 4)), "feature_cu": np.array([0, 1, 2])}, "ending at 3"),
    ],
)
def test_a_draft_batch_names_what_does_not_fit(change, says: str) -> None:
    given = {
        "request_ids": [0, 1], "anchors": np.array([1, 2]), "positions": np.array([3, 4]),
        "history": [[1], [2]], "sampling": SamplingBatch.greedy(2), "rounds": np.array([0, 0]),
    }  # fmt: skip
    with pytest.raises(ShapeError, match=says):
        DraftBatch(**(given | change))


def test_arrays_may_be_torch_tensors_everywhere() -> None:
    torch = pytest.importorskip("torch")

    def both(make):
        """The same call with numpy arrays and with tensors."""
        return make(np.asarray), make(lambda x: torch.from_numpy(np.asarray(x)))

    conf = np.random.default_rng(0).random((3, 3))
    lengths = np.array([3, 1, 2])
    plan = scheduler("causal")
    assert plan is not None
    a, b = both(lambda t: plan.budget(t(conf), t(lengths)))
    assert a == b
    a, b = both(lambda t: plan.allocate(4, t(conf), t(lengths)))
    assert a.tolist() == b.tolist()
    a, b = both(lambda t: Calibrator(3).apply(t(conf)))
    assert np.array_equal(a, b)
    n = np.array([3, 0, 2])
    a, b = both(lambda t: Calibrator(3).fit(t(conf), t(n), t(np.full(3, 3))))
    assert np.array_equal(a, b)
    drafts, logits = np.array([[1, 2, 0], [3, 0, 0], [2, 2, 0]]), np.zeros((9, 5))

    def verify(t):
        proposal = Proposal(t(drafts), t(lengths), q=t(np.full((3, 3, 5), 0.2)), conf=t(conf))
        batch = SamplingBatch(t(np.ones(3)), np.arange(3, dtype=np.uint64), t(np.zeros(3, int)))
        return Verifier().verify(t(logits), t(np.array([0, 4, 6, 9])), proposal, t(lengths), batch)

    a, b = both(verify)
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_array_equal(a.accept_prob, b.accept_prob)
    a, b = both(lambda t: DraftBatch(
        [0, 1], t(np.array([2, 4])), t(np.array([1, 1])), [[1, 2], [3, 4]],
        SamplingBatch.greedy(2), t(np.array([0, 0])),
    ))  # fmt: skip
    assert a.anchors.tolist() == b.anchors.tolist()
