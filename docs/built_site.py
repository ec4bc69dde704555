"""What a built site must not do: `python docs/built_site.py FOLDER`.

It is read from a folder, on machines without a network, so no page, style or script may load
anything from elsewhere (links that a reader follows may lead anywhere). A fence of code that is
left in the text of a page was not understood, and its code is shown as prose. A line of code that
is wider than a page shows is found by testing/wide_code.py, before anything is built.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"(?:https?:)?//")
LOADED_BY_STYLES = re.compile(r"(?:url\(\s*|@import\s+)['\"]?((?:https?:)?//[^'\")\s]+)")
LOADING_RELS = {"stylesheet", "preload", "preconnect", "prefetch", "modulepreload", "icon"}


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.text: list[str] = []
        self._code = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        if tag in ("pre", "code", "script", "style"):
            self._code += 1
        if tag == "link" and not LOADING_RELS & set(named.get("rel", "").split()):
            return
        wanted = [named.get("src", ""), named.get("srcset", "")]
        wanted += [named.get("href", "")] if tag == "link" else []
        self.loaded += [value for value in wanted if ELSEWHERE.match(value)]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("pre", "code", "script", "style"):
            self._code -= 1

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


def problems(site: Path) -> Iterator[str]:
    """One line for each thing that is wrong."""
    for path in sorted(site.rglob("*.html")):
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        name = path.relative_to(site)
        yield from (f"{name} loads {url}" for url in page.loaded)
        if "```" in "".join(page.text):
            yield f"{name}: a fence of code was not understood"
    for path in sorted([*site.rglob("*.css"), *site.rglob("*.svg")]):
        text = path.read_text(encoding="utf-8")
        yield from (
            f"{path.relative_to(site)} loads {url}" for url in LOADED_BY_STYLES.findall(text)
        )


if __name__ == "__main__":
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "the site loads nothing from elsewhere")
    sys.exit(bool(found))
