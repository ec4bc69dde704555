"""Text for the model: compact, and inside a delimiter that the content cannot forge."""

from __future__ import annotations

import hashlib

from deepinfer_search_fetch.models import FetchResponse, SearchResponse


def search_text(response: SearchResponse) -> str:
    """Rank, title, URL, date, authority tier and passage of every result."""
    lines: list[str] = []
    for r in response.results:
        date = f" · {r.published[:10]}" if r.published else ""
        lines.append(f"[{r.rank}] {r.title}\n{r.url}{date} · authority {r.authority.tier}")
        lines.append((r.content or r.summary or r.snippet).strip() + "\n")
    return fenced("search results", "\n".join(lines) if lines else "No results.")


def fetch_text(response: FetchResponse) -> str:
    """Title, URL and Markdown of one page."""
    more = f"\n(continues at offset {response.tokens.next_offset})" if response.truncated else ""
    return fenced(
        "web page",
        f"{response.title or ''}\n{response.final_url}\n\n{response.content.strip()}{more}",
    )


def fenced(label: str, content: str) -> str:
    """`content` between two marks that do not occur in it: data, never an instruction."""
    digest = hashlib.sha256(content.encode("utf-8", "replace")).hexdigest()
    length = 8
    while digest[:length] in content and length < len(digest):
        length += 8
    mark = f"data-{digest[:length]}"
    return f'<{mark} kind="{label}">\n{content}\n</{mark}>'
