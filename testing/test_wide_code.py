"""Code in pages is shown whole, without scrolling."""

from __future__ import annotations

from pathlib import Path

from wide_code import pages, wide_lines

ROOT = Path(__file__).parent.parent


def test_no_line_of_code_in_a_page_is_cut() -> None:
    wide = [
        f"{page.relative_to(ROOT)}:{number}: {line}"
        for page in pages(ROOT)
        for number, line in wide_lines(page.read_text(encoding="utf-8"))
    ]
    assert not wide, "break these lines of code before column 80:\n" + "\n".join(wide)


def test_only_code_is_looked_at() -> None:
    long = "x" * 90
    assert list(wide_lines(f"{long}\n```\n{long}\n```\n{long}")) == [(3, long)]
