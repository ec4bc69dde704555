"""What the commands show on a terminal. Everything from the web is text here, never markup."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console, Group
from rich.markdown import Markdown
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from deepinfer_search_fetch.models import FetchResponse, SearchResponse

# A page must not move the cursor, set the title or hide what it printed.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """Text without the control characters a terminal obeys."""
    return _CONTROLS.sub("", text)


def plain(response: FetchResponse) -> str:
    """The content in the wanted format, for pipes."""
    if response.format == "links":
        return "".join(f"{link.url}\t{link.text}\n" for link in response.links or ())
    if response.format == "outline":
        lines = (f"{'#' * e.level} {e.title}\t{e.token_offset}\n" for e in response.outline or ())
        return "".join(lines)
    return response.content


def show_page(response: FetchResponse, console: Console | None = None) -> None:
    """One page: what it is, its content laid out, where to go on."""
    console = console or Console()
    facts = [
        response.site_name,
        response.author,
        response.published and response.published[:10],
        response.page_type,
        f"{response.tokens.total:,} tokens",
        "cached" if response.cache.hit else None,
        "rendered" if response.extraction.rendered else None,
    ]
    head = Group(
        Text(safe(response.title or response.final_url), style="bold"),
        Text(safe(response.final_url), style="cyan"),
        Text(safe(" · ".join(fact for fact in facts if fact)), style="dim"),
    )
    console.print(Panel(head, border_style="dim"))
    text = safe(plain(response))
    console.print(Markdown(text) if response.format == "markdown" else Text(text))
    if response.tokens.next_offset is not None:
        where = response.tokens.next_offset
        console.print(Text(f"\ncontinues: --offset {where}", style="yellow"))
    for warning in response.extraction.warnings:
        console.print(Text(f"note: {safe(warning)}", style="dim"))


def show_results(response: SearchResponse, console: Console | None = None) -> None:
    """Results with their matches marked."""
    console = console or Console()
    for r in response.results:
        # Made of pieces, so that offsets into the snippet hold whatever is removed from it.
        snippet = Text("   ")
        at = 0
        for start, end in r.highlights:
            snippet.append(safe(r.snippet[at:start]))
            snippet.append(safe(r.snippet[start:end]), style="bold yellow")
            at = end
        snippet.append(safe(r.snippet[at:]))
        numbers = f"relevance {r.relevance:.2f}  authority {r.authority.score:.2f}"
        console.print(Text(safe(f"{r.rank}. {r.title}"), style="bold"))
        console.print(Text.assemble("   ", (safe(r.url), "cyan"), (f"  {numbers}", "dim")))
        console.print(snippet)
    if not response.results:
        empty = "index_empty" in response.warnings
        console.print("nothing found" + (" (the index is empty)" if empty else ""))


def show_usage(found: dict[str, Any], console: Console | None = None) -> None:
    """Sums of the ledger; money in whole units, without rounding."""
    console = console or Console()
    table = Table(title=f"{found['since']} to {found['until']}")
    columns = [*(_COLUMN_OF[g] for g in found["group_by"]), "quantity", "cache_hits", "price"]
    for name in columns:
        table.add_column(name, justify="left" if name in _COLUMN_OF.values() else "right")
    for row in [*found["usage"], *found["totals"]]:
        units, micros = divmod(int(row["price_micros"]), 1_000_000)
        shown = {**row, "price": f"{units}.{micros:06} {row['currency']}"}
        table.add_row(*(str(shown.get(name, "total")) for name in columns))
    console.print(table if found["usage"] else "nothing billed in this time")


_COLUMN_OF = {"key": "key_id", "endpoint": "endpoint", "day": "day", "month": "month"}
