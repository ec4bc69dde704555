"""The page at `/` in a real browser, and what its policy allows."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from service_harness import IndexedPage, Service

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
FORGED = "<script>document.title='owned'</script><b id=forged>bold</b>"


def dom(url: str, profile: Path) -> str:
    """The page's document after its scripts ran, as the browser serialises it."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--virtual-time-budget=10000", "--dump-dom", url,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def test_the_page_loads_nothing_from_elsewhere(serve: Callable[..., Service]) -> None:
    _, headers, page = serve().call("GET", "/")
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert not re.search(r"(?:src|href)\s*=|@import|url\(", page)
    assert headers["content-type"] == "text/html; charset=utf-8"


@needs_browser
def test_a_search_shows_results_as_text_in_a_browser(
    serve: Callable[..., Service], tmp_path: Path
) -> None:
    service = serve()
    service.client.backend.index(
        [
            IndexedPage(
                "https://forged.example/", FORGED, f"Newts {FORGED} swim. " * 10, "2026-01-01"
            )
        ]
    )
    service.client.backend.commit()
    found = dom(f"http://127.0.0.1:{service.port}/#q=newts", tmp_path / "profile")
    shown = re.search(r'<main id="out".*?</main>', found, re.S)
    assert shown is not None
    assert "https://forged.example/" in shown.group()
    assert "2 pages in the index" in found
    assert html.escape("<b id=forged>", quote=False) in shown.group()
    assert "<title>search-fetch</title>" in found
    assert "<mark>Newts</mark>" in shown.group()


@needs_browser
def test_a_refusal_is_shown_in_words(serve: Callable[..., Service], tmp_path: Path) -> None:
    service = serve(auth=True)
    found = dom(f"http://127.0.0.1:{service.port}/#q=voles", tmp_path / "profile")
    assert 'class="error">unauthorized: send the key' in found
