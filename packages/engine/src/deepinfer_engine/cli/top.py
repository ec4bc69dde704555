"""`deepinfer top`: a server's roles, queues, hits and times, live in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_engine.cli.options import HERE, ServerKey, ServerUrl, bearer
from deepinfer_engine.errors import EngineUnavailable

if TYPE_CHECKING:
    import httpx
    from rich.console import Console, RenderableType


def top(
    url: ServerUrl = HERE,
    api_key: ServerKey = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Look once; one JSON object on standard output.")
    ] = False,
) -> int:
    """Watch a server: roles, queues, cache hits, first tokens, token gaps. Ctrl-C ends it."""
    import json

    import httpx
    from rich.console import Console

    headers = bearer(api_key)
    with httpx.Client(base_url=url, headers=headers, timeout=10.0) as client:
        if as_json:
            print(json.dumps(asked(client), indent=2))
        elif once:
            Console().print(screen(url, asked(client)))
        else:
            _watch(client, url, every, Console())
    return 0


def asked(client: httpx.Client) -> dict[str, Any]:
    """The answer of `/status`. Raises EngineUnavailable, RequestError."""
    import httpx

    from deepinfer_engine.cli.client import raise_for

    try:
        answer = client.get("/status")
    except httpx.HTTPError as exc:
        raise EngineUnavailable(f"no server answers at {client.base_url}: {exc}") from exc
    raise_for(answer.status_code, answer.content)
    return answer.json()


def _watch(client: httpx.Client, url: str, every: float, console: Console) -> None:
    from rich.live import Live
    from rich.text import Text

    # One that is not there at the start is an error; one that goes away later may come back.
    shown: RenderableType = screen(url, asked(client))
    with Live(shown, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            live.update(shown, refresh=True)
            time.sleep(every)
            try:
                shown = screen(url, asked(client))
            except EngineUnavailable as exc:
                shown = Text(f"{exc}; looking again", style="red")


def screen(url: str, status: dict[str, Any]) -> RenderableType:
    """What is shown of one answer of `/status`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    recent = status["recent"]
    away = [w for w in status["workers"] if not w["ready"]]
    ready = status["status"] == "ready"
    head = Text.assemble(
        (f"{', '.join(status['models'])}", "bold"),
        f"  {url}  ",
        (status["status"], "green" if ready and not away else "red"),
        f"  {status['in_flight']} in flight",
    )
    numbers = Table.grid(padding=(0, 3))
    for _ in range(4):
        numbers.add_column()
    span = recent["seconds"]
    rate = recent["generated_tokens"] / span if span else 0.0
    numbers.add_row(
        f"tokens/s [b]{rate:,.1f}[/b]",
        f"prompt tokens [b]{recent['prompt_tokens']:,}[/b]",
        f"cache hits [b]{_share(recent['hit_rate'])}[/b]",
        f"drafts accepted [b]{_share(recent['accepted_rate'])}[/b]",
    )
    for name, label in (("ttft", "first token"), ("token_gap", "token gap")):
        found = recent[name]
        cells = [f"{p} [b]{_time(found[p])}[/b]" for p in ("p50", "p90", "p99")]
        numbers.add_row(label, *cells)
    failed = recent["errors"] + recent["aborts"]
    numbers.add_row(
        f"answers [b]{recent['requests']:,}[/b]",
        f"failed or left [b]{failed:,}[/b]",
        f"in the last {span:.0f} s",
        "",
    )
    workers = Table(box=None, pad_edge=False)
    for name in ("role", "worker", "state"):
        workers.add_column(name)
    for name in ("running", "waiting", "loading", "transfer", "blocks in use"):
        workers.add_column(name, justify="right")
    for one in status["workers"]:
        state = "draining" if one.get("draining") else "ready" if one["ready"] else one["detail"]
        style = "green" if one["ready"] and not one.get("draining") else "red"
        blocks = one.get("blocks_capacity")
        used = f"{blocks - one['blocks_free']}/{blocks}" if blocks else "-"
        workers.add_row(
            one["role"],
            one["name"],
            Text(state or "away", style=style),
            str(one.get("running", 0) + one.get("prefilling", 0)),
            str(one.get("waiting", 0) + one.get("reserve_queue", 0) + one.get("parked", 0)),
            str(one.get("loading", 0)),
            str(one.get("transferring", 0)),
            used,
        )
    parts: list[RenderableType] = [head, "", numbers, "", workers]
    parts += [Text(text, style="red") for text in status["problems"]]
    return Group(*parts)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
