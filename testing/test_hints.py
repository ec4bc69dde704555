"""What messages and pages tell a user to install can be installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FROM_AN_INDEX = re.compile(
    r"deepinfer-(?:recipe|kvtier|dspark|eplb|kernels|engine|search-fetch)\[[a-z]"
)
FROM_THE_CHECKOUT = re.compile(r"\./packages/(\w+)\[([a-z0-9,]+)\]")


def texts() -> dict[str, str]:
    """Sources, pages and the pages of packages: all that a user may read, but what is past."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/pages/**/*.md"), *ROOT.glob("packages/*/*.md")]
    found += [*ROOT.glob("packages/*/docs/*.md"), *ROOT.glob("packages/*/src/**/*.py")]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in found
        if path.name != "CHANGELOG.md"
    }


def test_no_text_names_a_package_that_no_index_has() -> None:
    wrong = [name for name, text in texts().items() if FROM_AN_INDEX.search(text)]
    assert not wrong, f"say './packages/NAME[extra]', which a checkout can install: {wrong}"


def test_every_extra_that_a_text_names_exists() -> None:
    extras = {
        path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"].get(
            "optional-dependencies", {}
        )
        for path in ROOT.glob("packages/*/pyproject.toml")
    }
    named = [
        (name, package, extra)
        for name, text in texts().items()
        for package, listed in FROM_THE_CHECKOUT.findall(text)
        for extra in listed.split(",")
    ]
    assert len(named) > 20, "hardly an extra is named: is this test right?"
    assert [row for row in named if row[2] not in extras[row[1]]] == []
