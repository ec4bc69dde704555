"""Arguments that fit nothing are refused by name; empty and broken input does no lasting harm."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_dspark import (
    BudgetScheduler,
    Calibrator,
    ConfidenceHistory,
    CounterRng,
    DraftBatch,
    MixedDrafter,
    NGramDrafter,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    ShapeError,
    StepTable,
    TableError,
    Verifier,
)

KEY = {"model": "m"}
ONE = np.ones(1)


def judge(q: Any = None, sampling: dict[str, Any] | None = None, **rest: Any) -> None:
    seeds, positions = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    Verifier().verify(
        np.zeros((3, 7)),
        [0, 3],
        Proposal(np.array([[1, 2]]), np.array([2]), q=q),
        [2],
        SamplingBatch(ONE, seeds, positions, **(sampling or {})),
        **rest,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"q": np.full((1, 2, 7), 1 / 7, dtype=np.float16)}, "q wants float32 or float64"),
        ({"masks": np.ones((1, 7), dtype=bool)}, "masks wants shape"),
        ({"masks": np.ones((2, 1), dtype=np.int32)}, "masks wants shape"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1, "raw_logits": np.zeros((2, 7))}, "raw_logits"),
        ({"sampling": {"top_p": -ONE}}, "top_p"),
        ({"sampling": {"min_p": 2 * ONE}}, "min_p"),
        ({"sampling": {"min_p": np.nan * ONE}}, "min_p"),
        ({"sampling": {"banned": RaggedIds.of([[99]])}}, "banned"),
        ({"sampling": {"banned": RaggedIds.of([[-1]])}}, "banned"),
        ({"sampling": {"logit_bias": RaggedIds.of([[1]])}}, "values.*logit_bias"),
        ({"sampling": {"logit_bias": RaggedIds.of([[99]], [[1.0]])}}, "logit_bias"),
        (
            {"sampling": {"penalties": Penalties(RaggedIds.of([[1]]), ONE, ONE, ONE)}},
            r"values.*penalties\.output",
        ),
    ],
)
def test_verify_names_what_does_not_fit(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        judge(**arguments)


@pytest.mark.parametrize("mode", ["causal", "uniform", "fixed", "threshold"])
def test_no_budget_verifies_less_than_nothing(mode: Any) -> None:
    scheduler = BudgetScheduler(StepTable.linear(10.0, 0.1), 3, mode)
    assert (scheduler.allocate(-1, np.ones((2, 3))) >= 0).all()
    for budget in (2.5, float("nan")):
        with pytest.raises(ShapeError, match="integer budget"):
            scheduler.allocate(budget, np.ones((2, 3)))  # type: ignore[arg-type]


def test_a_history_takes_no_requests_and_refuses_slots_it_has_not() -> None:
    history = ConfidenceHistory(4, 3)
    history.record([], np.ones((0, 3)))
    assert history.older([]).shape == (0, 3)
    for slots in ([-1], [4], [0.5]):
        with pytest.raises(ShapeError, match="slots"):
            history.record(slots, np.ones((1, 3)))
    with pytest.raises(ShapeError, match="conf"):
        history.record([1], np.ones((1, 2)))


def test_a_nan_confidence_does_not_spoil_a_calibrator() -> None:
    calibrator = Calibrator(2, drift_rate=0.1)
    conf, accepted, lengths = np.full((3, 2), np.nan), np.array([1, 2, 0]), np.array([2, 2, 2])
    calibrator.fit(conf, accepted, lengths)
    calibrator.update(conf, accepted, lengths)
    assert np.isfinite(calibrator.apply(np.full((1, 2), 0.5))).all()
    for wrong in ((conf[:, :1], accepted, lengths), (conf, accepted, lengths[:1])):
        with pytest.raises(ShapeError, match="want conf"):
            calibrator.update(*wrong)


def test_mixed_drafters_take_an_empty_batch() -> None:
    none = np.zeros(0, dtype=np.int64)
    batch = DraftBatch([], none, none, [], SamplingBatch.greedy(0), none)
    drafter = MixedDrafter(NGramDrafter(3), NGramDrafter(3))
    assert drafter.propose(batch, CounterRng()).tokens.shape == (0, 3)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"format": 1, "created": 1, "table": [[1e999, 1]], "above_last": "linear"}',
        b'{"format": 1, "created": ' + b"9" * 400 + b"}",
    ],
)
def test_damaged_tables_are_table_errors(tmp_path: Path, body: bytes) -> None:
    StepTable.linear(1.0, 0.1).save(tmp_path, KEY, now=1.0).write_bytes(body)
    with pytest.raises(TableError, match="remove it"):
        StepTable.load(tmp_path, KEY, now=1.0)


def test_a_folder_in_place_of_a_table_is_a_table_error(tmp_path: Path) -> None:
    path = StepTable.linear(1.0, 0.1).save(tmp_path, KEY)
    path.unlink()
    path.mkdir()
    with pytest.raises(TableError, match="not a regular file"):
        StepTable.load(tmp_path, KEY)


def test_threads_of_one_process_save_side_by_side(tmp_path: Path) -> None:
    table, failed = StepTable.linear(1.0, 0.1), []

    def save() -> None:
        try:
            for _ in range(30):
                table.save(tmp_path, KEY)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=save) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert StepTable.load(tmp_path, KEY) == table
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e-7])
def test_next_to_no_temperature_draws_the_most_likely_token(temperature: float) -> None:
    logits = np.array([[0.0, 5.0, 1.0], [3.0, 0.0, 1.0]])
    sampling = SamplingBatch(
        np.array([temperature]), np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64)
    )
    proposal = Proposal(np.array([[1]]), np.array([1]))
    assert Verifier().verify(logits, [0, 2], proposal, [1], sampling).emitted(0) == [1, 0]


def test_ragged_lists_and_tables_refuse_what_they_cannot_hold() -> None:
    for lists, values in (([1, 2], None), ([["a"]], None), ([[1]], [[1.0, 2.0]]), ([[1]], [1.0])):
        with pytest.raises(ShapeError, match=r"RaggedIds\.of"):
            RaggedIds.of(lists, values)  # type: ignore[arg-type]
    for tokens in (-1, 1.5):
        with pytest.raises(ShapeError, match="at least 0"):
            StepTable.linear(10.0, 0.1).cost(tokens)  # type: ignore[arg-type]
    for temperature in (np.inf, np.nan):
        with pytest.raises(ShapeError, match="finite temperatures"):
            SamplingBatch(np.array([temperature]), np.zeros(1, np.uint64), np.zeros(1, np.int64))
