"""Ranks in processes of their own vote over gloo, one of them is killed or stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"
STEPS = 30
PATIENCE_S = 120.0


@pytest.mark.parametrize(
    ("size", "fate"),
    [
        (2, "kill"),
        pytest.param(3, "kill", marks=pytest.mark.slow),
        pytest.param(2, "stop", marks=pytest.mark.slow),
        pytest.param(5, "stop", marks=pytest.mark.slow),
        pytest.param(8, "kill", marks=pytest.mark.slow),
    ],
)
def test_ranks_see_one_vote_and_hear_of_a_lost_one(tmp_path: Path, size: int, fate: str) -> None:
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SUPPORT / "voter.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(store), str(STEPS), fate],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        told = []
        for rank in ranks:
            assert rank.stdout is not None
            told.append(json.loads(rank.stdout.readline()))
        for rank in ranks[:-1]:
            assert rank.wait(PATIENCE_S) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    *others, gone = told
    assert len(gone["seen"]) == STEPS
    for one in others:
        assert one["seen"][:STEPS] == gone["seen"], "kind, sums and number of votes"
        assert one["wrong"] == []
        assert "did not vote" in one["lost"]
    assert sum(one["ends"] for one in others)
    kinds = {kind for kind, *_ in gone["seen"]}
    assert {"prefill", "decode"} <= kinds
