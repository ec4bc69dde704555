"""Trees from drafters: drafted, verified and kept; the whole round proved by enumeration."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_dspark import (
    CounterRng,
    DraftBatch,
    DraftModelTree,
    Penalties,
    RaggedIds,
    SamplingBatch,
    ShapeError,
    TokenTree,
    TreeLoop,
    TreeShape,
    verify_tree,
)
from deepinfer_dspark.check.cases import Case
from deepinfer_dspark.check.outcomes import outcomes
from deepinfer_dspark.loop import TargetOutput
from deepinfer_dspark.reference import verify_tree_one


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


class CaseModel:
    """The draft distributions of a made-up case, as a causal model behind a text of one token."""

    max_length = None

    def __init__(self, case: Case) -> None:
        self.case = case

    def logits(self, request_ids, texts):
        with np.errstate(divide="ignore"):
            return np.log(np.array([self.case.q(tuple(t[1:])) for t in texts]))

    def forget(self, request_id) -> None:
        pass


class Enumerated:
    """Uniforms that `outcomes` chooses."""

    def __init__(self, uniform) -> None:
        self.uniform = uniform

    def __call__(self, *key):
        return np.array([self.uniform()])


def asked(text: list[int], temperature: float = 1.0, wanted: int | None = None) -> DraftBatch:
    return DraftBatch(
        [0], np.array([text[-1]]), np.array([len(text) - 1]), [text],
        SamplingBatch.uniform(1, temperature=temperature), np.array([0]),
        wanted=None if wanted is None else np.array([wanted]),
    )  # fmt: skip


def trees(drafter: DraftModelTree) -> list[tuple[TokenTree, float]]:
    """Every tree the drafter makes behind the text [0], and how likely it is."""
    made: dict[tuple[int, ...], tuple[TokenTree, float]] = {}

    def play(uniform):
        tree = drafter.propose_tree(asked([0]), Enumerated(uniform))
        key = (*tree.tokens.tolist(), -9, *tree.parents.tolist())
        made.setdefault(key, (tree, 0.0))
        return key

    for key, mass in outcomes(play):
        tree, before = made[key]
        made[key] = tree, before + mass
    return list(made.values())


def laws(case: Case, tree: TokenTree) -> list[list[float]]:
    """Target distributions after the anchor and after each node."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    return [case.p(path) for path in paths]


def emitted_law(case: Case, drafter: DraftModelTree) -> np.ndarray:
    """Distribution of the first three tokens after one round, over every uniform it asks for."""
    out = np.zeros((case.vocab,) * 3)
    for tree, weight in trees(drafter):
        p = laws(case, tree)
        q = np.eye(case.vocab)[tree.tokens] if tree.q is None else tree.q
        for text, mass in outcomes(
            lambda u, t=tree, p=p, q=q: tuple(
                verify_tree_one(p, q.tolist(), t.tokens.tolist(), t.parents.tolist(), u)
            )
        ):
            case.complete(text[:3], weight * mass, out)
    return out


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_drafting_and_verifying_add_up_to_the_target(seed: int, drawn: bool) -> None:
    case = Case(3, 2, seed)
    drafter = DraftModelTree(CaseModel(case), TreeShape(2, 2, 4), drawn=drawn)
    assert np.abs(emitted_law(case, drafter) - case.target()).max() < 1e-6


def test_leaving_out_a_drawn_node_by_its_own_token_is_noticed() -> None:
    """The mistake the module's first lines warn of: a drawn tree cut to its likeliest nodes."""

    class Cut(DraftModelTree):
        def propose_tree(self, batch, rng):
            tree = super().propose_tree(batch, rng)
            q = np.asarray(tree.q)
            kept = np.flatnonzero(q[np.arange(tree.tokens.size), tree.tokens] > 0.4)
            return TokenTree(tree.tokens[kept], np.full(kept.size, -1), q[kept])

    case = Case(3, 2, 1)
    made = Cut(CaseModel(case), TreeShape(1, 2, 2), drawn=True)
    assert np.abs(emitted_law(case, made) - case.target()).max() > 1e-3


def test_the_fast_form_verifies_drafted_trees_as_the_twin_does() -> None:
    for seed, drawn in itertools.product(range(30), (False, True)):
        case = Case(4, 3, seed)
        drafter = DraftModelTree(CaseModel(case), TreeShape(3, 2, 7), drawn=drawn)
        tree = drafter.propose_tree(asked([0]), CounterRng())
        p = np.array(laws(case, tree))
        q = np.eye(4)[tree.tokens] if tree.q is None else np.asarray(tree.q)
        u = np.random.default_rng(seed).random(40).tolist()
        with np.errstate(divide="ignore"):
            got = verify_tree(
                np.log(p), tree, SamplingBatch.uniform(1), rng=Enumerated(iter(u).__next__)
            )
        want = verify_tree_one(
            p.tolist(), q.tolist(), tree.tokens.tolist(), tree.parents.tolist(), iter(u).__next__
        )
        assert list(got.tokens) == want


def test_shapes_of_trees() -> None:
    case = Case(6, 3, 3)
    tree = DraftModelTree(CaseModel(case), TreeShape(3, 3, 8)).propose_tree(
        asked([0]), CounterRng()
    )
    assert tree.tokens.size == 8
    assert tree.q is None
    paths = [tree.visible()[i + 1].sum() for i in range(8)]
    assert max(paths) <= 4
    assert (tree.parents < np.arange(8)).all()
    drawn = DraftModelTree(CaseModel(case), TreeShape(3, 3, 10), drawn=True)
    for rounds in range(5):
        tree = drawn.propose_tree(asked([0, rounds]), CounterRng())
        assert tree.tokens.size <= 10
        for parent in set(tree.parents.tolist()):
            family = tree.tokens[tree.parents == parent]
            assert np.unique(family).size == family.size
    # greedy requests take the likeliest branches; no room, no tree
    assert drawn.propose_tree(asked([0], temperature=0.0), CounterRng()).q is None
    assert drawn.propose_tree(asked([0], wanted=0), CounterRng()).tokens.size == 0
    assert drawn.propose_tree(asked([0], wanted=1), CounterRng()).depths().max() == 1


class ToyTree:
    """`TreeTarget` over the toy model: rows see the committed entries and their ancestors."""

    def __init__(self, model) -> None:
        self.model, self.vocab_size, self.max_length = model, model.vocab, None

    def start(self, prompt):
        n = len(prompt) - 1
        entries = self.model.entries(np.array(prompt[:-1], dtype=np.int64), np.arange(n))
        return [entries], None

    def forward(self, tokens, positions, visible, state):
        self.new = self.model.entries(np.asarray(tokens), np.asarray(positions))
        rows = [
            self.model.rows(np.concatenate([state[0], self.new[seen]]), 1)[0] for seen in visible
        ]
        return TargetOutput(np.array(rows))

    def keep(self, state, rows):
        state[0] = np.concatenate([state[0], self.new[rows]])


@pytest.mark.parametrize("drawn", [False, True])
def test_greedy_text_through_trees_is_that_of_plain_decoding(drawn: bool) -> None:
    model, draft = toy.ToyModel(seed=1), toy.ToyModel(seed=1, sharpness=2.0)
    for prompt in ([1, 2, 3], [4], [5, 6, 7, 8]):
        for shape in (TreeShape(), TreeShape(2, 2, 3), TreeShape(1, 1, 1)):
            drafter = DraftModelTree(toy.ToyCausal(draft), shape, drawn=drawn)
            made = TreeLoop(drafter, ToyTree(model)).generate(prompt, SamplingBatch.greedy(1), 13)
            assert made.tokens == toy.plain(model, prompt, 13)
            assert made.accepted == 13 - made.rounds


def test_stops_penalties_and_limits_hold_in_trees() -> None:
    model = toy.ToyModel(seed=1)
    free = toy.plain(model, [1, 2], 12)
    drafter = DraftModelTree(toy.ToyCausal(model))
    stop = SamplingBatch(
        np.zeros(1), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64),
        stop_ids=RaggedIds.of([[free[5]]]),
    )  # fmt: skip
    made = TreeLoop(drafter, ToyTree(model)).generate([1, 2], stop, 12)
    assert made.tokens == free[: free.index(free[5]) + 1]
    once = SamplingBatch(
        np.zeros(1), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64),
        penalties=Penalties(presence=np.array([1e9]), frequency=np.zeros(1),
                            repetition=np.ones(1), output=RaggedIds.of([[]], [[]])),
    )  # fmt: skip
    made = TreeLoop(drafter, ToyTree(model)).generate([1, 2], once, 9)
    assert len(set(made.tokens)) == 9
    with pytest.raises(ShapeError, match="one request"):
        TreeLoop(drafter, ToyTree(model)).generate([1], SamplingBatch.greedy(2), 3)
    with pytest.raises(ShapeError, match="depth, branches and nodes"):
        TreeShape(0)
    with pytest.raises(ShapeError, match="stays whole"):
        DraftModelTree(toy.ToyCausal(model), TreeShape(2, 3, 2), drawn=True)


def test_sampled_text_through_trees_follows_the_target() -> None:
    """4,000 texts of two tokens; chi-square with 35 degrees of freedom below its 1e-4 quantile."""
    model, draft, n = toy.ToyModel(vocab=6, seed=3, sharpness=1.5), toy.ToyModel(vocab=6), 4000
    law = np.zeros((6, 6))
    causal = toy.ToyCausal(model)
    first = np.exp(causal.logits([0], [[1, 2]])[0])
    first /= first.sum()
    for a in range(6):
        second = np.exp(causal.logits([0], [[1, 2, a]])[0])
        law[a] = first[a] * second / second.sum()
    counts = np.zeros((6, 6))
    loop = TreeLoop(DraftModelTree(toy.ToyCausal(draft), TreeShape(1, 2, 2), drawn=True),
                    ToyTree(model))  # fmt: skip
    for seed in range(n):
        sampling = SamplingBatch.uniform(1, seeds=np.array([seed], dtype=np.uint64))
        counts[tuple(loop.generate([1, 2], sampling, 2).tokens)] += 1
    assert float(((counts - n * law) ** 2 / (n * law)).sum()) < 75.0
