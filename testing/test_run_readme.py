"""Examples in pages run, and print what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_readme import run

FENCE = "```"


def page(folder: Path, code: str, output: str | None = None) -> Path:
    path = folder / "README.md"
    text = f"{FENCE}python\n{code}\n{FENCE}\n"
    if output is not None:
        text += f"\n{FENCE}output\n{output}\n{FENCE}\n"
    path.write_text(text)
    return path


def test_an_example_that_raises_is_found(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"README.md:1: this example fails"):
        run(page(tmp_path, "1 / 0"))


def test_output_that_is_not_what_the_page_says_is_found(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"the page says\ntwo\nand this was printed\none"):
        run(page(tmp_path, "print('one')", "two"))


def test_dots_stand_for_anything(tmp_path: Path) -> None:
    assert run(page(tmp_path, "print('one of', 3)", "one of ...")) == 1


def test_an_example_may_say_nothing_of_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(page(tmp_path, "print('one')")) == 1
    assert capsys.readouterr().out == "one\n"
