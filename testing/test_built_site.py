"""A page that needs a network, or shows its code as prose, is found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def built_site() -> ModuleType:
    path = Path(__file__).parent.parent / "docs" / "built_site.py"
    spec = importlib.util.spec_from_file_location("built_site", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "body",
    [
        '<script src="https://cdn.example/a.js"></script>',
        '<link rel="stylesheet" href="//cdn.example/a.css">',
        '<img src="http://cdn.example/a.png">',
        "<p>```python no-run</p>",
    ],
)
def test_a_page_that_is_wrong_is_found(tmp_path: Path, built_site: ModuleType, body: str) -> None:
    (tmp_path / "a.html").write_text(body)
    assert len(list(built_site.problems(tmp_path))) == 1


def test_a_style_that_loads_a_font_is_found(tmp_path: Path, built_site: ModuleType) -> None:
    (tmp_path / "a.css").write_text("@font-face{src:url(https://fonts.example/a.woff2)}")
    assert list(built_site.problems(tmp_path)) == ["a.css loads https://fonts.example/a.woff2"]


def test_links_that_a_reader_follows_may_lead_anywhere(
    tmp_path: Path, built_site: ModuleType
) -> None:
    page = '<a href="https://example.org">there</a><pre>```</pre><script src="own.js"></script>'
    (tmp_path / "a.html").write_text(page)
    assert list(built_site.problems(tmp_path)) == []
