"""Arguments that fit nothing are refused by name, before anything is computed from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer_eplb import (
    Balancer,
    EplbError,
    LoadWindow,
    dispatch,
    initial_placement,
    maps_of,
    movement,
    plan,
    slots_for,
    waterfill,
)
from deepinfer_eplb.cli import main

LOADS = np.random.default_rng(0).poisson(50, (20, 2, 8))
PLACED = initial_placement(2, 8, 12)
LOG2PHY, LOGCNT = (m[0] for m in maps_of(PLACED, 8))
TOPK = np.array([[0, 1], [2, 3], [7, 0]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": 4.0}, "num_gpus wants an integer"),
        ({"num_gpus": True}, "num_gpus wants an integer"),
        ({"num_slots": "12"}, "num_slots wants an integer"),
        ({"max_swaps": None}, "max_swaps"),
        ({"scenarios": 2.5}, "scenarios"),
        ({"num_nodes": 2.0}, "num_nodes"),
        ({"num_groups": 0}, "num_groups"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),  # would be random: the same input makes the same bytes
        ({"window": [[1, 2], [3]]}, "rectangular"),
    ],
)
def test_plan_names_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EplbError, match=words):
        plan(**({"window": LOADS, "num_gpus": 4, "num_slots": 12} | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk_logical": TOPK + 0.7}, "topk_logical wants integers"),
        ({"topk_logical": TOPK > 3}, "topk_logical wants integers"),
        ({"logcnt": LOGCNT * 0}, "logcnt in 1..2"),
        ({"logcnt": LOGCNT + 5}, "logcnt in 1..2"),
        ({"mode": "local", "slots_per_rank": 0}, "slots_per_rank"),
        ({"mode": "local", "ranks_per_node": 0}, "ranks_per_node"),
        ({"mode": "local", "source_rank": -1}, "source_rank"),
        ({"mode": "waterfill", "shares": np.ones(4)}, "shares"),
        ({"mode": "waterfill", "shares": np.full(12, np.nan)}, "shares"),
        ({"mode": "waterfill", "shares": -np.ones(12)}, "shares"),
    ],
)
def test_dispatch_names_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    arguments = {"topk_logical": TOPK, "log2phy": LOG2PHY, "logcnt": LOGCNT}
    with pytest.raises(EplbError, match=words):
        dispatch(**(arguments | change))


def test_dispatch_takes_numpy_integers_for_layer_and_step() -> None:
    same = dispatch(TOPK, LOG2PHY, LOGCNT, layer=57, step=2**62)
    assert np.array_equal(
        dispatch(TOPK, LOG2PHY, LOGCNT, layer=np.int32(57), step=np.int64(2**62)),  # type: ignore[arg-type]
        same,
    )


@pytest.mark.parametrize(
    ("loads", "placed", "gpus", "words"),
    [
        (LOADS[0, 0] * np.nan, PLACED[0], 4, "finite"),
        (-LOADS[0, 0], PLACED[0], 4, "not negative"),
        (LOADS, PLACED[0], 4, "loads"),
        (LOADS[0, 0], PLACED[0] + 5, 4, r"expert ids 0\.\.7"),
        (LOADS[0, 0], PLACED[0] + 0.5, 4, "phy2log wants integers"),
        (LOADS[0, 0], np.zeros(12, dtype=int), 4, "no replica of expert 1"),
        (LOADS[0, 0], PLACED[0], 0, "num_gpus"),
    ],
)
def test_waterfill_loses_no_load(loads: Any, placed: Any, gpus: int, words: str) -> None:
    with pytest.raises(EplbError, match=words):
        waterfill(loads, placed, gpus)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": PLACED[0] + 0.5}, "old wants integers"),
        ({"num_gpus": 0}, "num_gpus"),
        ({"ranks_per_node": 0}, "ranks_per_node"),
        ({"ranks_per_node": 1.5}, "ranks_per_node"),
        ({"buckets": 2.5}, "buckets"),
    ],
)
def test_movement_names_what_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(EplbError, match=words):
        movement(**({"old": PLACED[0], "new": PLACED[0][::-1], "num_gpus": 4} | change))


@pytest.mark.parametrize(
    ("counts", "experts", "words"),
    [
        (np.ones((2, 3), dtype=int), np.full((2, 3), -1), "slot_experts"),
        (np.ones((2, 3), dtype=int), np.full((2, 3), 9), "slot_experts"),
        (np.full((2, 3), np.nan), np.ones((2, 3), dtype=int), "whole numbers"),
        (np.full((2, 3), 0.5), np.ones((2, 3), dtype=int), "whole numbers"),
        (np.ones(2, dtype=int), np.ones(2, dtype=int), "one shape"),
    ],
)
def test_a_window_records_counts_of_known_experts_alone(
    counts: Any, experts: Any, words: str
) -> None:
    window = LoadWindow(2, 8)
    with pytest.raises(EplbError, match=words):
        window.add(counts, experts)
    assert window.recorded == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": -1}, "layers"),
        ({"experts": 0}, "experts"),
        ({"initial": initial_placement(2, 8, 16)}, "initial wants shape"),
        ({"initial": initial_placement(3, 8, 12)}, "initial wants shape"),
        ({"weights": [[np.zeros((12, 3))]]}, "weights wants"),
        ({"weights": [[np.zeros((3, 3))]] * 2}, "weights wants"),
    ],
)
def test_a_balancer_refuses_what_belongs_to_another_group(
    change: dict[str, Any], words: str
) -> None:
    sizes = {"layers": 2, "experts": 8, "num_gpus": 4, "num_slots": 12}
    with pytest.raises(EplbError, match=words):
        Balancer(**(sizes | change))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["bench", "--seeds", "-1"], "seed wants"), (["demo", "--steps", "-1"], "steps wants")],
)
def test_the_command_refuses_negative_numbers_in_a_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert words in capsys.readouterr().err


def test_maps_and_slots_name_what_does_not_fit() -> None:
    assert maps_of(PLACED.tolist(), 8)[1].tolist() == maps_of(PLACED, 8)[1].tolist()
    for placed in ([0, 1], [[0.5, 1]], [[0, 0, 1]], [[0, 9]]):
        with pytest.raises(EplbError, match="phy2log"):
            maps_of(placed, 3)
    for sizes, words in (
        ((8, 1, 0), "num_gpus"),
        ((8, -1, 2), "redundant"),
        ((0, 1, 2), "experts"),
    ):
        with pytest.raises(EplbError, match=words):
            slots_for(*sizes)


def test_a_closed_balancer_says_so() -> None:
    balancer = Balancer(2, 8, 4, 12)
    balancer.close()
    balancer.close()
    with pytest.raises(EplbError, match="closed"):
        balancer.step()
