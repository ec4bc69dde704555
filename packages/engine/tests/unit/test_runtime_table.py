"""The table of invariants in docs/ has every row, and names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "runtime-tests.md"
WANTED = [f"I-{n:02}" for n in (*range(1, 38), 40, 49)] + ["T-SCH-05"]


def rows() -> dict[str, str]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    cells = [[c.strip() for c in line.strip("| ").split("|")] for line in lines]
    return {row[0]: row[-1] for row in cells if re.match(r"(I|T-SCH)-\d+$", row[0])}


NAMED = sorted({n for tests in rows().values() for n in re.findall(r"`(\S+\.py::\S+)`", tests)})


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_is_there(name):
    path, _, function = name.partition("::")
    root = TESTS.parents[1] if path.startswith("../") else TESTS
    file = root / path.removeprefix("../")
    if not file.exists() and path.startswith("../"):
        pytest.skip(f"{path} belongs to another package, which is not here")
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_of_the_specification_has_a_test():
    assert sorted(rows()) == sorted(WANTED)
    assert [row for row, tests in rows().items() if "::test_" not in tests] == []
