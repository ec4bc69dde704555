"""The README's examples that need an extra run as they stand (the others run with the bare
package, where the documentation is checked)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str, capsys) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    exec(compile(block, str(README), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
