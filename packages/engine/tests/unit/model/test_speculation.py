"""Drafts where they pay, by injected step times; nothing here is timed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_engine.adapters.dspark import Proposal, StepTable
from deepinfer_engine.core.device import CPU
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.calibration import ROUNDS, SEQUENCES, measure, step_key
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.speculation import (
    ENOUGH_STEPS,
    PROBE_STEPS,
    DraftBudget,
    StepTimes,
    between,
)


def line(first: float, last: float) -> StepTable:
    """Milliseconds of 1 and of 200."""
    return between((1, 200), (first, last))


FLAT = StepTimes(line(10.0, 10.5), line(1.0, 1.0))
"""A step costs what it costs whatever its tokens: drafts are nearly free."""
STEEP = StepTimes(line(1.0, 200.0), line(1.0, 200.0))
"""A token costs a token: drafts cannot pay."""


def drafts(conf: np.ndarray) -> Proposal:
    """As many as there are confidences."""
    rows, length = conf.shape
    return Proposal(np.zeros(conf.shape, dtype=np.int64), all_(rows, length), conf=conf)


def all_(n: int, value: int) -> np.ndarray:
    return np.full(n, value, dtype=np.int64)


def test_free_drafts_are_all_verified() -> None:
    budget = DraftBudget(FLAT, 5)
    assert budget.pays(1)
    assert budget.pays(32)
    lengths = budget.lengths(drafts(np.full((4, 5), 0.9)), np.array([5, 3, 0, 5]))
    assert lengths.tolist() == [5, 3, 0, 5]


def test_dear_drafts_are_not_made_but_for_a_probe() -> None:
    budget = DraftBudget(STEEP, 5)
    said = [budget.pays(4) for _ in range(7 * PROBE_STEPS)]
    probes = [i + 1 for i, drafts in enumerate(said) if drafts]
    assert probes == [PROBE_STEPS, 3 * PROBE_STEPS, 7 * PROBE_STEPS]


def test_what_is_accepted_decides_what_is_drafted() -> None:
    middling = StepTimes(line(10.0, 110.0), line(4.0, 40.0))
    budget = DraftBudget(middling, 5)
    assert budget.pays(2)
    for _ in range(200):
        budget.observe(all_(2, 5), all_(2, 0))
    assert not budget.pays(2)
    for _ in range(200):
        budget.observe(all_(2, 5), all_(2, 5))
    assert budget.pays(2)


def test_what_steps_really_made_and_cost_decides() -> None:
    budget = DraftBudget(FLAT, 5)
    for _ in range(ENOUGH_STEPS):
        assert budget.pays(4)
        budget.timed(4, 24, 8, 60.0, drafted=True)
    for _ in range(ENOUGH_STEPS):
        assert not budget.pays(4)  # some without drafts, to compare
        budget.timed(4, 4, 4, 10.0, drafted=False)
    assert not budget.pays(4)  # twice the tokens in six times the time
    assert budget.pays(32)  # of that size nothing was seen
    for _ in range(200):
        budget.timed(4, 24, 8, 12.0, drafted=True)
    assert budget.pays(4)


def test_the_likelier_drafts_are_verified_first() -> None:
    rising = StepTimes(between((1, 4, 5, 100), (10.0, 12.0, 30.0, 400.0)), FLAT.drafting)
    budget = DraftBudget(rising, 3)
    conf = np.array([[0.9, 0.9, 0.9], [0.2, 0.2, 0.2]])
    lengths = budget.lengths(drafts(conf), all_(2, 3))
    assert lengths.sum() <= 2
    assert lengths[0] >= lengths[1]


def test_times_are_kept_by_model_and_settings(tmp_path: Path) -> None:
    FLAT.save(tmp_path, {"model": "a"})
    loaded = StepTimes.load(tmp_path, {"model": "a"})
    assert loaded is not None
    assert loaded.forward.cost(200) == 10.5
    assert StepTimes.load(tmp_path, {"model": "b"}) is None


def generate(runner: TorchRunner, steps: int, temperature: float) -> tuple[list[int], int]:
    """(tokens of two sequences end to end, drafts made)."""
    sampling = SamplingParams(temperature=temperature, seed=5, ignore_eos=True, max_tokens=99)
    histories, drafted = [], 0
    for slot, seed in ((1, 3), (2, 4)):
        ids = np.random.default_rng(seed).integers(20, 300, 40)
        table = [slot * 2 - 1, slot * 2]
        runner.clear_state(slot)
        chunk = PrefillChunk(
            ids, 0, (), table, slot, sampling, True, prompt_len=40, prompt=ids.tolist()
        )
        (first,) = runner.prefill([chunk])
        assert first is not None
        histories.append([*ids.tolist(), *first.tokens])
    for _ in range(steps):
        rows = [
            DecodeRow(h, 40, [2 * i + 1, 2 * i + 2], i + 1, sampling, runner.caps.nextn)
            for i, h in enumerate(histories)
        ]
        for history, out in zip(histories, runner.decode(rows), strict=True):
            history += out.tokens
            drafted += out.n_drafted
    return [t for h in histories for t in h[40 : 40 + steps]], drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_does_not_depend_on_the_times(tiny_dir: Path, temperature: float) -> None:
    made = build_runner(tiny_dir, dtype="float64", num_blocks=8, num_state_slots=4)
    free = generate(TorchRunner(made.model, made.caps, CPU, FLAT), 12, temperature)
    dear = generate(TorchRunner(made.model, made.caps, CPU, STEEP), 12, temperature)
    off = generate(TorchRunner(made.model, replace(made.caps, nextn=0)), 12, temperature)
    assert free[0] == dear[0] == off[0]
    assert free[1] > 0
    assert dear[1] == 0


def test_a_model_can_be_measured_with_any_clock(tiny_dir: Path) -> None:
    runner = build_runner(
        tiny_dir,
        num_blocks=2 * max(SEQUENCES) + 2,
        num_state_slots=max(SEQUENCES) + 2,
    )
    ticks = iter(range(10**9))
    told: list[tuple[int, int]] = []
    found = measure(
        runner.model,
        runner.caps.nextn,
        clock=lambda: next(ticks),
        heard=lambda *at: told.append(at),
    )
    assert found.times.forward.cost(1) == found.times.drafting.cost(32) > 0
    assert found.spread == 1
    assert told[0][0] == 1
    assert told[-1][0] == told[-1][1] == len(told)


def test_times_that_others_disturb_in_all_rounds_but_one_are_those_of_that_round(
    tiny_dir: Path,
) -> None:
    runner = build_runner(
        tiny_dir, num_blocks=2 * max(SEQUENCES) + 2, num_state_slots=max(SEQUENCES) + 2
    )
    round_, now = 0, 0.0

    def heard(done: int, of: int) -> None:
        nonlocal round_
        round_ = done * ROUNDS // of

    def clock() -> float:
        nonlocal now
        now += 1.0 if round_ == ROUNDS // 2 else 50.0
        return now

    found = measure(runner.model, 1, clock=clock, heard=heard)
    each = 1e3 / torch.get_num_threads()
    assert found.times.forward.ms == (each,) * len(found.times.forward.ms)
    assert found.times.drafting.ms == (each,) * len(found.times.drafting.ms)
    assert found.spread == 50


def test_it_is_saved_under_what_it_depends_on(tiny_dir: Path) -> None:
    runner = build_runner(tiny_dir, num_blocks=2, num_state_slots=2)
    key = step_key(runner.model, "float32", CPU)
    assert key["model"] == runner.layout.layout_hash


@pytest.mark.parametrize("name", ["forward", "drafting"])
def test_a_damaged_table_counts_as_none(tmp_path: Path, name: str) -> None:
    FLAT.save(tmp_path, {"model": "a"})
    for file in tmp_path.iterdir():
        file.write_text("{")
    assert StepTimes.load(tmp_path, {"model": "a"}) is None


class Pair:
    """The sums of two processes, which call them in turn: the second says what the first missed."""

    def __init__(self, other: np.ndarray | None = None) -> None:
        self.other, self.told = other, list[np.ndarray]()

    def all_reduce_sum(self, values: np.ndarray) -> np.ndarray:
        self.told.append(values)
        return values if self.other is None else values + self.other


def test_processes_of_a_group_fill_up_to_the_size_that_pays_for_all() -> None:
    """A step takes as long as its fullest process: one with little to do drafts as much as the
    others' size has room for."""
    sure = drafts(np.full((1, 3), 0.9))
    alone = DraftBudget(STEEP, 3).lengths(sure, np.array([3])).tolist()
    quiet = Pair()
    DraftBudget(STEEP, 3, quiet).lengths(drafts(np.full((8, 3), 0.9)), all_(8, 3))
    beside = DraftBudget(STEEP, 3, Pair(quiet.told[0])).lengths(sure, np.array([3])).tolist()
    assert alone == [1]
    assert beside == [3], "the step waits for eight sequences anyway"


def test_every_step_of_a_group_is_one_sum_drafts_or_not(tiny_dir: Path) -> None:
    built = build_runner(tiny_dir, dtype="float64", num_blocks=8, num_state_slots=4)
    sums = Pair()
    runner = TorchRunner(built.model, built.caps, CPU, FLAT, lambda: 0.0, group=sums)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    history = list(range(5, 25))
    chunk = PrefillChunk(np.array(history), 0, (), [1, 2], 1, greedy, True, prompt=history)
    (first,) = runner.prefill([chunk])
    assert first is not None
    history += first.tokens
    assert len(sums.told) == 1
    runner.mixed((), ())
    assert len(sums.told) == 2
    for drafts_wanted in (5, 0, 5, 5):
        before = len(sums.told)
        (row,) = runner.decode([DecodeRow(history, 20, [1, 2], 1, greedy, drafts_wanted)])
        history += row.tokens
        assert len(sums.told) == before + 1
    assert len({len(told) for told in sums.told}) == 1
