"""Every known way to get this wrong is made on purpose; the proofs must notice each.

A mutation replaces one piece of source text and loads the changed module beside the real one, so a
refactoring that moves the text fails here aloud instead of testing nothing.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    Proposal,
    SamplingBatch,
    StepTable,
    Verifier,
    draft_law,
    drafting,
    sampling,
    verification,
)
from deepinfer_dspark.drafters.mixed import DraftModelDrafter
from deepinfer_dspark.loop import SpecLoop
from deepinfer_dspark.reference import LawSpec, law_of


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


proofs, toymodel = load("proofs"), load("toymodel")


def mutant(module: types.ModuleType, *changes: tuple[str, str]) -> types.ModuleType:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(old) == 1, f"mutation no longer applies to {module.__name__}: {old!r}"
        source = source.replace(old, new)
    changed = types.ModuleType(f"mutant_{module.__name__.rsplit('.', 1)[1]}")
    sys.modules[changed.__name__] = changed  # dataclasses look their module up
    exec(compile(source, str(module.__file__), "exec"), changed.__dict__)
    return changed


def law_error(verifier: Verifier, **toy) -> float:
    """Largest deviation over budgets of the enumerated output law from the target's."""
    made = proofs.Toy(**({"vocab": 3, "gamma": 2, "seed": 2} | toy))
    scheduler = BudgetScheduler(proofs.table(), made.gamma, "causal")
    return max(
        float(np.abs(proofs.output_law(made, scheduler, b, verifier) - made.law()).max())
        for b in range(3)
    )


def verification_mutant(*changes: tuple[str, str]) -> Verifier:
    return mutant(verification, *changes).Verifier()


def law_mutant(*changes: tuple[str, str]) -> Verifier:
    module = mutant(verification, ("class Verifier:", "class Verifier:\n    mutated = True\n"))
    module.__dict__["DraftLaw"] = mutant(draft_law, *changes).DraftLaw
    return module.Verifier()


def sampling_mutant(*changes: tuple[str, str]) -> Verifier:
    changed = mutant(sampling, *changes)
    module = mutant(verification, ("class Verifier:", "class Verifier:\n    mutated = True\n"))
    module.__dict__["edit_logits"] = changed.edit_logits
    module.__dict__["scale_and_truncate"] = changed.scale_and_truncate
    return module.Verifier()


def allowed(prefix):
    return {0, 2} if len(prefix) != 1 else {1}


PENALTIES = {"target": LawSpec(presence=1.0, frequency=0.9, repetition=1.4), "output": (0, 1)}

LAW_MUTATIONS: dict[str, tuple[Callable[[], Verifier], dict]] = {
    "residual replaced by target": (
        lambda: verification_mutant(
            ("p[at] = self.xp.subtract_clipped(self.xp.take(p, at), q)", "p[at] = p[at]")
        ),
        {},
    ),
    "one uniform for draft and acceptance": (
        lambda: verification_mutant(('self.rng("accept"', 'self.rng("draft"')),
        {},
    ),
    "q row shifted by one": (
        lambda: law_mutant(
            ("to_host(self._q[request, k, np", "to_host(self._q[request, k - 1, np")
        ),
        {},
    ),
    "residual of the wrong row": (
        lambda: law_mutant(("rows, width = q[request, k]", "rows, width = q[request, k - 1]")),
        {},
    ),
    "ratio turned over": (
        lambda: verification_mutant(("(1.0, target / draft)", "(1.0, draft / target)")),
        {},
    ),
    "final token from the row before": (
        lambda: verification_mutant(("= self.cu[:-1] + run\n", "= self.cu[:-1] + run - (run > 0)\n")),  # noqa: E501
        {},
    ),
    "missing mask on a row": (
        lambda: sampling_mutant(
            ("xp.mask_rows(xp.widen(out), masks)",
             "xp.mask_rows(out, masks | (rows.offset == 1)[:, None])")
        ),
        {"vocab": 3, "allowed": allowed},
    ),
    "penalties without the drafts": (
        lambda: sampling_mutant(("< rows.offset[:, None]", "< 0 * rows.offset[:, None]")),
        PENALTIES,
    ),
    "repetition ignores the prompt": (
        lambda: sampling_mutant(("if penalties.prompt is not None:", "if False:")),
        PENALTIES | {"prompt": (2,)},
    ),
    "top-k before top-p": (
        lambda: sampling_mutant(("asked < 1, vocab, asked)", "asked < 1, vocab, asked - 1)")),
        {"vocab": 4, "target": LawSpec(top_k=2)},
    ),
    "temperature forgotten": (
        lambda: sampling_mutant(("np.maximum(sampling.temperature[request]", "np.maximum(np.ones(request.size)")),  # noqa: E501
        {"target": LawSpec(temperature=0.5)},
    ),
    "ban forgotten": (
        lambda: sampling_mutant(("    if sampling.banned is not None:", "    if False:")),
        {"target": LawSpec(banned=(1,))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAW_MUTATIONS)
def test_the_law_proof_kills(name: str) -> None:
    build, toy = LAW_MUTATIONS[name]
    assert law_error(Verifier(), **toy) < 1e-12
    assert law_error(build(), **toy) > 1e-3


class PublishedCase(proofs.Toy):
    """p = (0.7, 0.3), q = (0.5, 0.5), one draft."""

    def logits(self, prefix):
        return np.log([0.7, 0.3])

    def q(self, prefix):
        return [0.5, 0.5]


@pytest.mark.parametrize(
    ("change", "first"),
    [
        (("p[at] = self.xp.subtract_clipped(self.xp.take(p, at), q)", "p[at] = p[at]"), 0.64),
        (('self.rng("accept"', 'self.rng("draft"'), None),
    ],
)
def test_mutations_give_the_wrong_laws_known_from_the_literature(change, first) -> None:
    toy = PublishedCase(2, 1)
    scheduler = BudgetScheduler(proofs.table(), 1, "causal")
    law = proofs.output_law(toy, scheduler, 1, verification_mutant(change)).sum(axis=1)
    assert abs(law[0] - 0.7) > 0.02
    if first is not None:
        assert law[0] == pytest.approx(first, abs=1e-9)


def draft_law_error(module) -> float:
    """Deviation of q as returned from the law the drafts are really drawn from, by counting."""
    n = 40_000
    logits = np.tile(np.array([[1.0, 0.0, -1.0]]), (n, 1))
    params = SamplingBatch.uniform(n, temperature=0.5)
    tokens, q = module.sample_drafts(logits, params, np.zeros(n, dtype=np.int64), 0, drafting_rng())
    counted = np.bincount(tokens, minlength=3) / n
    return float(np.abs(counted - np.asarray(q[0])).max())


def drafting_rng():
    from deepinfer_dspark import CounterRng

    return CounterRng()


def test_q_taken_before_the_temperature_is_noticed() -> None:
    changed = mutant(drafting, ("        q[random] = rows\n", ""))
    assert draft_law_error(drafting) < 0.01
    assert draft_law_error(changed) > 0.05
    # and such a q breaks the output law
    toy = proofs.Toy(3, 2, seed=2, draft=LawSpec(temperature=0.4))

    class WrongQ(Verifier):
        def verify(self, logits, cu_lens, proposal, lens, sampling, masks=None, rng=None, **kw):
            warm = np.array(proposal.q) ** 0.4
            q = warm / warm.sum(axis=-1, keepdims=True)
            return super().verify(
                logits, cu_lens, replace(proposal, q=q), lens, sampling, masks, rng, **kw
            )

    scheduler = BudgetScheduler(proofs.table(), 2, "causal")
    wrong = proofs.output_law(toy, scheduler, 2, WrongQ())
    assert np.abs(wrong - toy.law()).max() > 1e-3


def two_request_error(choose) -> float:
    class Rising(proofs.Toy):
        """Per-token confidences that may rise: 0.3 first, then 0.9 or 0.1 by the first draft."""

        def conf(self, prefix):
            return 0.3 if not prefix else (0.9 if prefix[0] == 0 else 0.1)

    toys = (Rising(2, 2, seed=0), Rising(2, 2, seed=7))
    scheduler = BudgetScheduler(proofs.table(), 2, "causal")
    joint = proofs.joint_law(toys, scheduler, 2, Verifier(), choose)
    return float(np.abs(joint - np.outer(toys[0].law().ravel(), toys[1].law().ravel())).max())


def test_counting_the_winners_of_a_score_that_rises_is_noticed() -> None:
    def winners(conf):
        flat = conf.ravel()
        won = np.zeros(flat.size, dtype=bool)
        won[np.argsort(-flat, kind="stable")[:2]] = True
        return won.reshape(conf.shape).sum(axis=1)

    assert two_request_error(None) < 1e-12
    assert two_request_error(winners) > 1e-3


class Leaky(PublishedCase):
    """c_1 = 0.8, then 0.9 or 0 by the first draft."""

    def conf(self, prefix):
        return 0.8 if not prefix else (0.9 if prefix[0] == 0 else 0.0)


def test_a_budget_searched_on_current_sampled_drafts_gives_085_instead_of_070() -> None:
    table = StepTable((1, 2, 3), (1.0, 2.0, 1 / 0.45))
    free = BudgetScheduler(table, 2, "exact")

    def retrospective(conf):
        # pretending that sampled drafts are deterministic is what the scheduler cannot check
        return free.allocate(free.budget(conf, deterministic=True), conf)

    law = proofs.output_law(Leaky(2, 2), free, 0, Verifier(), retrospective)
    assert law.reshape(2, -1).sum(axis=1) == pytest.approx([0.85, 0.15], abs=1e-9)


def stop_is_right(verifier: Verifier) -> bool:
    """Drafts 4, 9, 5 are all accepted; 9 ends the request, so 5 and the bonus must not appear."""
    logits = np.full((4, 10), -30.0)
    logits[np.arange(4), [4, 9, 5, 6]] = 30.0
    proposal = Proposal(np.array([[4, 9, 5]]), np.array([3]))
    params = replace(SamplingBatch.greedy(1), eos_ids=(9,))
    out = verifier.verify(logits, np.array([0, 4]), proposal, np.array([3]), params)
    return (
        out.emitted(0) == [4, 9]
        and bool(out.stopped[0])
        and out.final[0] == -1
        and out.n_accepted[0] == 2
        and out.judged[0] == 2
    )


def test_a_stop_token_inside_the_run_that_is_ignored_is_noticed() -> None:
    changed = verification_mutant(
        ("kept = np.where(hit, stop.argmax(axis=1) + 1, count)", "kept = count")
    )
    assert stop_is_right(Verifier())
    assert not stop_is_right(changed)


def logprobs_are_right(verifier: Verifier) -> bool:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 6))
    logits[0, 2] = logits[1, 4] = 9.0
    proposal = Proposal(np.array([[2, 4]]), np.array([2]))
    params = SamplingBatch.greedy(1)
    out = verifier.verify(logits, np.array([0, 3]), proposal, np.array([2]), params, logprobs=0)
    assert out.logprobs is not None
    expected = [
        np.log(law_of(logits[i].tolist(), LawSpec()))[t] for i, t in enumerate(out.emitted(0))
    ]
    return bool(np.allclose(out.logprobs, expected, atol=1e-12))


def test_a_shifted_logprob_row_is_noticed() -> None:
    changed = verification_mutant(("cu[owner] + within", "cu[owner] + np.maximum(within - 1, 0)"))
    assert logprobs_are_right(Verifier())
    assert not logprobs_are_right(changed)


def state_error(*, roll_back: bool) -> float:
    """Largest difference between the cache after generation and a fresh prefill of the text."""
    model = toymodel.ToyModel()
    target = toymodel.ToyTarget(model, roll_back=roll_back)
    drafter = DraftModelDrafter(toymodel.ToyCausal(toymodel.ToyModel(seed=1)), 3)
    worst = 0.0
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]

    class Watching(toymodel.ToyTarget):
        def commit(self, state, keep):
            nonlocal worst
            tokens = self.flat
            super().commit(state, keep)
            for r, cache in enumerate(state):
                self.texts[r] += tokens[r][: int(keep[r])]
                fresh = model.entries(np.array(self.texts[r]), np.arange(len(self.texts[r])))
                if cache.shape != fresh.shape:
                    worst = np.inf
                else:
                    worst = max(worst, float(np.abs(cache - fresh).max()))

        def forward(self, tokens, cu_lens, positions, state):
            self.flat = [
                tokens[cu_lens[r] : cu_lens[r + 1]].tolist() for r in range(len(cu_lens) - 1)
            ]
            return super().forward(tokens, cu_lens, positions, state)

        def start(self, prompts):
            self.texts = [list(p[:-1]) for p in prompts]
            return super().start(prompts)

        def select(self, state, requests):
            self.texts = [self.texts[r] for r in requests.tolist()]
            return super().select(state, requests)

    watching = Watching(model, roll_back=target.roll_back)
    SpecLoop(drafter, watching).generate(prompts, SamplingBatch.uniform(3), 12)
    return worst


def test_rejected_entries_left_in_the_cache_are_noticed() -> None:
    assert state_error(roll_back=True) == 0.0
    assert state_error(roll_back=False) > 0.0
