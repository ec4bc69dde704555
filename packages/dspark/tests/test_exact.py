"""The output law equals the target law to 1e-12, by exact enumeration, in every mode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_dspark import BudgetScheduler, LosslessnessError, Verifier
from deepinfer_dspark.reference import LawSpec


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


proofs = load("proofs")
Toy = proofs.Toy
TOLERANCE = 1e-12

SPECS = {
    "plain": LawSpec(),
    "greedy": LawSpec(temperature=0.0),
    "cool": LawSpec(temperature=0.6),
    "hot": LawSpec(temperature=1.7),
    "top-p": LawSpec(top_p=0.7),
    "top-k": LawSpec(top_k=2),
    "min-p": LawSpec(min_p=0.3),
    "all cuts": LawSpec(temperature=0.8, top_p=0.9, top_k=3, min_p=0.05),
    "penalties": LawSpec(presence=0.8, frequency=0.7, repetition=1.3),
    "bias and ban": LawSpec(bias={0: 1.0, 2: -0.5}, banned=(1,)),
}


def deviation(toy, mode: str, budget: int, **options) -> float:
    scheduler = BudgetScheduler(proofs.table(), toy.gamma, mode, **options)
    return float(np.abs(proofs.output_law(toy, scheduler, budget, Verifier()) - toy.law()).max())


@pytest.mark.parametrize("q_form", ["dense", "sparse", "point"])
@pytest.mark.parametrize("name", SPECS)
def test_every_sampling_parameter_is_lossless_with_every_form_of_q(name: str, q_form: str) -> None:
    toy = Toy(4, 2, seed=5, target=SPECS[name], q_form=q_form, output=(0, 0, 3), prompt=(1,))
    for budget in (0, 1, 2):
        assert deviation(toy, "causal", budget) < TOLERANCE


@pytest.mark.parametrize("mode", ["causal", "uniform", "threshold", "fixed", "exact"])
@pytest.mark.parametrize("seed", range(3))
def test_every_scheduler_mode_is_lossless_for_every_budget(mode: str, seed: int) -> None:
    toy = Toy(3, 3, seed=seed, q_form="point" if mode == "exact" else "dense")
    for budget in range(4):
        assert deviation(toy, mode, budget, fixed_len=min(budget, 3)) < TOLERANCE


@pytest.mark.parametrize("mode", ["uniform", "threshold", "fixed", "exact"])
@pytest.mark.parametrize("name", ["cool", "all cuts", "penalties", "bias and ban"])
def test_every_mode_is_lossless_with_every_kind_of_parameter(name: str, mode: str) -> None:
    toy = Toy(4, 2, seed=9, target=SPECS[name], output=(0, 0, 3), prompt=(1,),
              q_form="point" if mode == "exact" else "dense")  # fmt: skip
    for budget in range(3):
        assert deviation(toy, mode, budget, fixed_len=budget) < TOLERANCE


@pytest.mark.parametrize("mode", ["uniform", "threshold", "fixed"])
def test_two_requests_stay_independent_in_the_other_modes(mode: str) -> None:
    toys = (Toy(2, 2, seed=3), Toy(3, 2, seed=103))
    product = np.outer(toys[0].law().ravel(), toys[1].law().ravel())
    for budget in range(5):
        scheduler = BudgetScheduler(proofs.table(), 2, mode, fixed_len=budget // 2)
        joint = proofs.joint_law(toys, scheduler, budget, Verifier())
        assert np.abs(joint - product).max() < TOLERANCE


def test_the_draft_may_have_another_temperature_and_cut_than_the_target() -> None:
    toy = Toy(4, 2, seed=8, target=LawSpec(top_p=0.8), draft=LawSpec(temperature=0.5, top_k=2))
    assert deviation(toy, "causal", 2) < TOLERANCE


def test_grammar_masks_are_lossless_and_rows_behind_an_illegal_draft_need_none() -> None:
    def allowed(prefix):
        return {0, 1} if len(prefix) % 2 == 0 else {1, 2, 3}

    for q_form in ("dense", "point"):
        toy = Toy(4, 2, seed=3, allowed=allowed, q_form=q_form)
        for budget in (0, 1, 2):
            assert deviation(toy, "causal", budget) < TOLERANCE


def test_five_tokens_three_drafts() -> None:
    assert deviation(Toy(5, 3, seed=12), "causal", 2) < TOLERANCE


@pytest.mark.parametrize("budget", range(5))
@pytest.mark.parametrize("seed", range(2))
def test_two_requests_competing_for_a_budget_stay_independent(budget: int, seed: int) -> None:
    toys = (Toy(2, 2, seed=seed), Toy(3, 2, seed=100 + seed))
    scheduler = BudgetScheduler(proofs.table(), 2, "causal")
    joint = proofs.joint_law(toys, scheduler, budget, Verifier())
    product = np.outer(toys[0].law().ravel(), toys[1].law().ravel())
    assert np.abs(joint - product).max() < TOLERANCE


def test_ties_of_saturated_confidences_stay_lossless() -> None:
    class Saturated(Toy):
        def conf(self, prefix):
            return 1.0 if sum(prefix) % 2 == 0 else 0.5

    toys = (Saturated(2, 2, seed=1), Saturated(2, 2, seed=2))
    scheduler = BudgetScheduler(proofs.table(), 2, "causal")
    for budget in range(5):
        joint = proofs.joint_law(toys, scheduler, budget, Verifier())
        product = np.outer(toys[0].law().ravel(), toys[1].law().ravel())
        assert np.abs(joint - product).max() < TOLERANCE


def test_searching_the_budget_on_current_point_mass_drafts_is_lossless() -> None:
    toys = (Toy(3, 2, seed=4, q_form="point"), Toy(2, 2, seed=5, q_form="point"))
    scheduler = BudgetScheduler(proofs.table(), 2, "exact")

    def choose(conf):
        return scheduler.allocate(scheduler.budget(conf, deterministic=True), conf)

    joint = proofs.joint_law(toys, scheduler, 0, Verifier(), choose)
    product = np.outer(toys[0].law().ravel(), toys[1].law().ravel())
    assert np.abs(joint - product).max() < TOLERANCE


def test_searching_the_budget_on_current_sampled_drafts_is_refused() -> None:
    scheduler = BudgetScheduler(proofs.table(), 2, "exact")
    with pytest.raises(LosslessnessError, match="causal"):
        scheduler.budget(np.full((1, 2), 0.5))


class Counterexample(Toy):
    """p = (0.7, 0.3), q = (0.5, 0.5), c_1 = 0.8, c_2 = 0.9 or 0 by the first draft."""

    def logits(self, prefix):
        return np.log([0.7, 0.3])

    def q(self, prefix):
        return [0.5, 0.5]

    def conf(self, prefix):
        return 0.8 if not prefix else (0.9 if prefix[0] == 0 else 0.0)


def test_the_published_counterexample_leaks_085_when_the_rule_is_bypassed() -> None:
    """Step rates 1, 0.5, 0.45: verify both drafts or none, whichever the *current* a promises."""
    rates = np.array([1.0, 0.5, 0.45])

    def retrospective(conf):
        tau = 1.0 + np.concatenate([[0.0], np.cumsum(np.cumprod(conf[0]))])
        return np.array([int(np.argmax(tau * rates))])

    toy = Counterexample(2, 2)
    scheduler = BudgetScheduler(proofs.table(), 2, "causal")
    law = proofs.output_law(toy, scheduler, 0, Verifier(), retrospective)
    first = law.reshape(2, -1).sum(axis=1)
    assert first == pytest.approx([0.85, 0.15], abs=1e-12)
    for budget in range(3):
        fixed = proofs.output_law(toy, scheduler, budget, Verifier())
        assert fixed.reshape(2, -1).sum(axis=1) == pytest.approx([0.7, 0.3], abs=1e-12)
