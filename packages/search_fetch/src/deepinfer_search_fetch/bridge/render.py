"""Text for the model: compact, and inside a delimiter that the content cannot forge."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deepinfer_search_fetch.bridge.policy import Source
from deepinfer_search_fetch.models import FetchResponse, SearchResponse

CITE = "Cite what you use by its number in brackets, such as [{0}]."


def search_text(response: SearchResponse, sources: Sequence[Source], *, citing: bool) -> str:
    """Number, title, URL, date, authority tier and passage of every result."""
    lines: list[str] = []
    for r, source in zip(response.results, sources, strict=True):
        date = f" · {r.published[:10]}" if r.published else ""
        lines.append(
            f"[{source.number}] {source.title}\n{source.url}{date} · authority {r.authority.tier}"
        )
        lines.append(source.text.strip() + "\n")
    text = fenced("search results", "\n".join(lines) if lines else "No results.")
    return f"{text}\n{CITE.format(sources[0].number)}" if citing and sources else text


def restored_text(sources: Sequence[Source]) -> str:
    """Results of an earlier turn, from their sealed contents."""
    lines = [f"[{s.number}] {s.title}\n{s.url}\n{s.text.strip()}\n" for s in sources]
    return fenced("search results", "\n".join(lines) if lines else "No results.")


def fetch_text(response: FetchResponse, source: Source, *, citing: bool) -> str:
    """Title, URL and Markdown of one page."""
    more = f"\n(continues at offset {response.tokens.next_offset})" if response.truncated else ""
    text = fenced(
        "web page",
        f"[{source.number}] {source.title}\n{source.url}\n\n{source.text.strip()}{more}",
    )
    return f"{text}\n{CITE.format(source.number)}" if citing else text


def found_text(url: str, pattern: str, windows: Sequence[str]) -> str:
    """The places of a pattern in a page."""
    body = "\n---\n".join(windows) if windows else "The pattern does not occur in this page."
    return fenced("found in page", f"{url}\npattern: {pattern}\n\n{body}")


def fenced(label: str, content: str) -> str:
    """`content` between two marks that do not occur in it: data, never an instruction."""
    digest = hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()
    length = 8
    while digest[:length] in content and length < len(digest):
        length += 8
    mark = f"data-{digest[:length]}"
    return f'<{mark} kind="{label}">\n{content}\n</{mark}>'
