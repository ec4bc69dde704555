"""`deepinfer usage`: what was used and what it cost, from ledgers or from a running server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_engine.cli.options import Json, ServerKey, bearer, server_option
from deepinfer_engine.errors import ConfigError, EngineUnavailable


def usage(
    ledgers: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LEDGER]...", help="Ledgers to add up; default: the setting."),
    ] = None,
    url: Annotated[
        str | None, server_option("Ask this server instead; its admin key shows all keys.")
    ] = None,
    api_key: ServerKey = None,
    key: Annotated[str | None, typer.Option(help="The id of one API key; default: all.")] = None,
    since: Annotated[
        str | None, typer.Option(help="From this date or time on: 2026-11-01, UTC.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before this date or time.")] = None,
    by: Annotated[
        str, typer.Option(help="Group by some of key, model, protocol, period, day, month.")
    ] = "key",
    as_json: Json = False,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of settings; default: ./deepinfer.toml.")
    ] = None,
) -> int:
    """Answers, tokens and exact cost of every API key."""
    from deepinfer_engine.server.usage import parse_groups, parse_span

    try:
        groups, span = parse_groups(by), parse_span(since, until)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if url is not None:
        rows = _asked(url, api_key, {"since": since, "until": until, "by": by})
        if key is not None:
            rows = [row for row in rows if row.get("key", key) == key]
    else:
        rows = _read(ledgers or _own(config), key, span, groups)
    if as_json:
        print(json.dumps({"by": list(groups), "data": rows}, indent=2))
    else:
        _show(rows, groups)
    return 0


def _own(config: Path | None) -> list[Path]:
    from deepinfer_engine.settings import load_settings

    found = load_settings({}, config=config).ledger
    if found is None:
        raise ConfigError(
            "no ledger is named: `deepinfer usage FILE`, or the setting `ledger` that "
            "`deepinfer serve --ledger FILE` writes"
        )
    return [found.expanduser()]


def _read(
    ledgers: Sequence[Path], key: str | None, span: tuple[float, float], groups: Sequence[Any]
) -> list[dict[str, Any]]:
    """Rows of several ledgers, those of one group added up."""
    from deepinfer_engine.server.ledger import UsageRow, add_up, read_usage

    rows: list[UsageRow] = []
    for path in ledgers:
        rows += read_usage(path, key=key, since=span[0], until=span[1], by=groups)
    return [row.shown() for row in add_up(rows)]


def _asked(url: str, api_key: str | None, query: dict[str, str | None]) -> list[dict[str, Any]]:
    import httpx

    from deepinfer_engine.cli.client import raise_for

    headers = bearer(api_key)
    try:
        answer = httpx.get(
            url.rstrip("/") + "/v1/usage",
            params={name: value for name, value in query.items() if value is not None},
            headers=headers,
            timeout=30,
        )
    except httpx.HTTPError as exc:
        raise EngineUnavailable(f"no server answers at {url}: {exc}") from exc
    raise_for(answer.status_code, answer.content)
    return list(answer.json()["data"])


def _show(rows: Sequence[dict[str, Any]], groups: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    numbers = ("answers", "prompt_tokens", "cached_tokens", "output_tokens")
    table = Table(box=None, pad_edge=False)
    for name in groups:
        table.add_column(name)
    for name in (*numbers, "cost"):
        table.add_column(name.replace("_", " "), justify="right")
    unsettled = sum(row["unsettled"] for row in rows)
    if unsettled:
        table.add_column("unsettled", justify="right")
    for row in rows:
        cells = [str(row[name]) or "-" for name in groups]
        cells += [f"{row[name]:,}" for name in numbers]
        cells.append(f"{row['cost']} {row['currency']}" if row["currency"] else "-")
        table.add_row(*cells, *([str(row["unsettled"])] if unsettled else []))
    if not rows:
        print("nothing was used in that time", file=sys.stderr)
        return
    Console(highlight=False).print(table)
    if unsettled:
        print(
            "unsettled: the server died while these answers ended; they cost nothing",
            file=sys.stderr,
        )
