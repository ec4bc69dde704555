"""The files and functions that the pages for contributors name are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from named_places import places, problem

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_place_that_a_page_names_is_there(page: str) -> None:
    named = list(places((ROOT / page).read_text(encoding="utf-8")))
    assert named, f"{page} names no place: the pattern of this test is wrong"
    missing = [f"`{place}`: {problem(ROOT, place)}" for place in named if problem(ROOT, place)]
    assert not missing, f"{page} names what is not there:\n" + "\n".join(missing)


def test_a_wrong_name_is_found() -> None:
    text = "See `engine/core/loop.py::EngineLoop.step`, `engine/core/none.py` and `testing/`."
    assert [problem(ROOT, place) for place in places(text)] == [
        None,
        "engine/core/none.py does not exist",
        None,
    ]
    assert problem(ROOT, "engine/core/loop.py::EngineLoop.stop") is not None
    assert list(places("`a/b.py <x>`, `nox -s lint/x`, \n```\n`c/d.py`\n```\n")) == []
