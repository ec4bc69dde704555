"""Trees keep the target's distribution: the twin by enumeration, the fast form beside the twin."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest

from deepinfer_dspark import (
    CounterRng,
    Proposal,
    SamplingBatch,
    ShapeError,
    TokenTree,
    Verifier,
    verify_tree,
)
from deepinfer_dspark.check.cases import Case
from deepinfer_dspark.check.outcomes import outcomes
from deepinfer_dspark.reference import verify_tree_one

PARENTS = (-1, -1, 0)  # two drafts for the first place, and one behind the first of them
KINDS = ["numpy"] + (["torch"] if importlib.util.find_spec("torch") else [])


def without(law: list[float], gone: int) -> list[float]:
    rest = [0.0 if t == gone else v for t, v in enumerate(law)]
    total = sum(rest)
    return [v / total for v in rest] if total > 0 else law


def families(case: Case, form: str):
    """(tokens, q rows, weight) of every tree the drafter may propose."""
    V, root = case.vocab, case.q(())
    if form == "best":  # the two most likely, taken without drawing
        a, b = sorted(range(V), key=lambda t: -root[t])[:2]
        c = max(range(V), key=lambda t: case.q((a,))[t])
        point = [[1.0 if t == x else 0.0 for t in range(V)] for x in (a, b, c)]
        yield (a, b, c), point, 1.0
        return
    for a, b, c in itertools.product(range(V), repeat=3):
        second = root if form == "with replacement" else without(root, a)
        q = [root, second, case.q((a,))]
        weight = q[0][a] * q[1][b] * q[2][c]
        if weight > 0:
            yield (a, b, c), q, weight


@pytest.mark.parametrize("form", ["with replacement", "without replacement", "best"])
@pytest.mark.parametrize("seed", range(3))
def test_every_outcome_of_the_twin_adds_up_to_the_target(form: str, seed: int) -> None:
    case = Case(3, 2, seed)
    out = np.zeros((3, 3, 3))
    for tokens, q, weight in families(case, form):
        p = [case.p(()), case.p(tokens[:1]), case.p(tokens[1:2]), case.p((tokens[0], tokens[2]))]

        def play(uniform, tokens=tokens, p=p, q=q):
            return tuple(verify_tree_one(p, q, tokens, PARENTS, uniform))

        for text, mass in outcomes(play):
            case.complete(text, weight * mass, out)
    assert np.abs(out - case.target()).max() < 1e-7


def test_siblings_tried_against_the_wrong_law_are_noticed() -> None:
    """The second child taken for one drawn with replacement though it was drawn without."""
    case, out = Case(3, 1, 1), np.zeros((3, 3))
    root = case.q(())
    for a, b in itertools.permutations(range(3), 2):
        weight = root[a] * without(root, a)[b]
        p = [case.p(()), case.p((a,)), case.p((b,))]
        if weight > 0:
            for text, mass in outcomes(
                lambda u, p=p, a=a, b=b: tuple(
                    verify_tree_one(p, [root, root], (a, b), (-1, -1), u)
                )
            ):
                case.complete(text, weight * mass, out)
    assert np.abs(out - case.target()).max() > 1e-3


class Recorded:
    """Uniforms in the order of asking, the same for both forms."""

    def __init__(self, seed: int) -> None:
        self.values = np.random.default_rng(seed).random(64).tolist()

    def __call__(self, *key):
        value = self.values.pop(0)
        return np.array([value]) if key else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["drawn", "best"])
def test_the_fast_form_does_what_the_twin_does(form: str, kind: str) -> None:
    rng = np.random.default_rng(5)
    for case in range(60):
        N, V = int(rng.integers(0, 9)), 6
        parents = [int(rng.integers(-1, i)) for i in range(N)]
        p = rng.dirichlet(np.full(V, 0.7), size=N + 1)
        q = rng.dirichlet(np.full(V, 0.7), size=N) if form == "drawn" else np.zeros((N, V))
        tokens = [int(rng.choice(V, p=q[i])) if form == "drawn" else int(rng.integers(V))
                  for i in range(N)]  # fmt: skip
        if form == "best":
            q[np.arange(N), tokens] = 1.0
        logits, law = np.log(p), (q if form == "drawn" else None)
        if kind == "torch":
            import torch

            logits, law = torch.from_numpy(logits), None if law is None else torch.from_numpy(law)
        tree = TokenTree(np.array(tokens, dtype=int), np.array(parents, dtype=int), law)
        got = verify_tree(logits, tree, SamplingBatch.uniform(1), rng=Recorded(case))
        assert list(got.tokens) == verify_tree_one(
            p.tolist(), q.tolist(), tokens, parents, Recorded(case)
        )
        assert [tokens[i] for i in got.path] == list(got.tokens[:-1])


def test_a_chain_is_a_tree_and_greedy_and_coupled_text_is_that_of_the_verifier() -> None:
    rng = np.random.default_rng(6)
    for seed in range(60):
        logits = rng.normal(size=(4, 5)) * 2
        drafts = logits[:3].argmax(axis=1) if seed % 2 else rng.integers(0, 5, 3)
        for temperature in (0.0, 0.9):
            sampling = SamplingBatch(
                np.array([temperature]), np.array([seed], dtype=np.uint64), np.array([7]),
                coupled=np.array([True]),
            )  # fmt: skip
            tree = TokenTree(drafts, np.arange(3) - 1)
            want = Verifier().verify(
                logits, [0, 4], Proposal(drafts[None], np.array([3])), [3], sampling
            )
            assert list(verify_tree(logits, tree, sampling).tokens) == want.emitted(0)


def test_greedy_takes_the_branch_that_agrees() -> None:
    tree = TokenTree(np.array([3, 1, 2, 0]), np.array([-1, -1, 1, 2]))
    logits = np.eye(5)[[1, 4, 2, 0, 4]]
    got = verify_tree(logits, tree, SamplingBatch.greedy(1))
    assert (got.tokens, got.path, got.dead) == ((1, 2, 0, 4), (1, 2, 3), False)
    assert tree.depths().tolist() == [0, 1, 1, 2, 3]
    assert tree.visible()[4].tolist() == [True, False, True, True, True]


def test_drafts_that_cannot_have_been_drawn_are_passed_over() -> None:
    """1,500 rounds, chi-square with 2 degrees of freedom below its 1e-4 quantile."""
    p = np.array([0.2, 0.3, 0.5])
    for q in ([0.0, 0.5, 0.5], [np.nan, 0.5, 0.5], [2.0, 0.0, 0.0], [0.3, 0.3, 0.3]):
        tree = TokenTree(np.array([0, -1]), np.array([-1, -1]), np.array([q, q]))
        counts, n = np.zeros(3), 1500
        for seed in range(n):
            got = verify_tree(
                np.tile(np.log(p), (3, 1)), tree,
                SamplingBatch.uniform(1, seeds=np.array([seed], dtype=np.uint64)), rng=CounterRng(),
            )  # fmt: skip
            assert got.path == ()
            counts[got.tokens[0]] += 1
        assert float(((counts - n * p) ** 2 / (n * p)).sum()) < 18.4


def test_masks_and_dead_rows() -> None:
    tree = TokenTree(np.array([1]), np.array([-1]))
    masks = np.array([[False, True, False], [False, False, False]])
    got = verify_tree(np.zeros((2, 3)), tree, SamplingBatch.uniform(1), masks)
    assert (got.tokens, got.path, got.dead) == ((1,), (0,), True)


@pytest.mark.parametrize(
    "build",
    [
        lambda: TokenTree(np.array([1, 2]), np.array([-1])),
        lambda: TokenTree(np.array([1, 2]), np.array([-1, 1])),
        lambda: TokenTree(np.array([1]), np.array([-2])),
        lambda: TokenTree(np.array([1]), np.array([-1]), np.ones((2, 3))),
        lambda: verify_tree(
            np.zeros((3, 4)), TokenTree(np.array([1]), np.array([-1])), SamplingBatch.greedy(1)
        ),
        lambda: verify_tree(
            np.zeros((2, 4)), TokenTree(np.array([1]), np.array([-1])), SamplingBatch.greedy(2)
        ),
    ],
)
def test_trees_that_fit_nothing_are_refused(build) -> None:
    with pytest.raises(ShapeError):
        build()
