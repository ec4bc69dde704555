"""The table of failures in docs/ names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "disaggregation-tests.md"
ROWS = [f"T-PD-{n:02}" for n in range(1, 12)] + [f"T-LB-{n:02}" for n in range(1, 6)]
ROWS += [f"I-{n}" for n in range(38, 49) if n != 40]  # the others: test_runtime_table.py


def rows() -> list[list[str]]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    cells = [line.strip("| ").split("|") for line in lines if line.startswith("| ")]
    return [row for row in cells if row[-1].strip() != "test"]


NAMED = sorted({name for row in rows() for name in re.findall(r"`(\S+\.py\S*)`", row[-1])})


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_is_there(name):
    path, _, function = name.partition("::")
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_specification_has_a_test():
    found = {row[0].strip() for row in rows()}
    assert set(ROWS) <= found
    without = [row[0] for row in rows() if "::test_" not in row[-1]]
    assert without == []
