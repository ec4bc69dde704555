"""Lines of code blocks in pages that are wider than a page shows without scrolling."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 79


def wide_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, line) of each one that is too wide."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = line.strip()[:3]
        if mark in ("```", "~~~") and (not fence or mark == fence):
            fence = "" if fence else mark
        elif fence and len(line) > WIDTH:
            yield number, line


def pages(root: Path) -> list[Path]:
    """Every page of the site that people write."""
    found = [root / "ARCHITECTURE.md", root / "CONTRIBUTING.md", *root.glob("docs/pages/**/*.md")]
    found += [*root.glob("packages/*/*.md"), *root.glob("packages/*/docs/*.md")]
    return sorted(found)


if __name__ == "__main__":
    for page in pages(Path(sys.argv[1])):
        for number, line in wide_lines(page.read_text(encoding="utf-8")):
            print(f"{page}:{number}: {line}")
