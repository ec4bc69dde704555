"""`deepinfer bench`: load on a running server, closed or open, made up or from a trace."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_engine.cli.options import HERE, Json, ServerKey, ServerUrl
from deepinfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer_engine.cli.load.client import Seen, Target
    from deepinfer_engine.cli.load.workload import Session


def bench(
    url: ServerUrl = HERE,
    api_key: ServerKey = None,
    model: Annotated[str | None, typer.Option(help="Name to ask for; default: its first.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests; default: 64, or the whole trace.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Closed loop: sessions at once, the next when one ends.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Open loop: sessions that begin each second, at random."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Replay a Mooncake trace (JSONL) at its own times.")
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Of a trace: times as fast.")] = 1.0,
    scale: Annotated[
        float, typer.Option(min=0.0001, max=100, help="Of a trace: its lengths times this.")
    ] = 1.0,
    sessions: Annotated[
        int | None, typer.Option(min=1, help="Agents instead: so many, each of several turns.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Of an agent.")] = 5,
    pause_s: Annotated[float, typer.Option(min=0, help="Before each further turn.")] = 0.0,
    shared: Annotated[
        int, typer.Option(min=0, help="First tokens that all prompts have in common.")
    ] = 0,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of a prompt; of an agent, that each turn adds.")
    ] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 64,
    seed: Annotated[int, typer.Option(help="Another one makes other prompts.")] = 0,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML page with charts there.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Put load on a server and measure: first tokens, gaps, rates, cache hits. Its counts are held
    against the server's own, where that tells them and nobody else asks it."""
    from rich.console import Console

    from deepinfer_engine.cli.load.report import lines, page
    from deepinfer_engine.cli.load.workload import agents, mooncake, plain, read_trace

    if sum(one is not None for one in (trace, sessions)) > 1:
        raise typer.BadParameter("--trace and --sessions are two loads; name one")
    if trace is not None and rate is not None:
        raise typer.BadParameter("a trace has its own times: leave --rate out, or use --speed")
    text = None if trace is None else read_trace(trace)

    def made(target: Target) -> list[Session]:
        if text is not None:
            return list(mooncake(target.words, text, requests=requests, speed=speed, scale=scale))
        if sessions is not None:
            return list(
                agents(
                    target.words, sessions=sessions, turns=turns, shared=shared,
                    prompt_tokens=prompt_tokens, output_tokens=output_tokens, pause_s=pause_s,
                    seed=seed,
                )
            )  # fmt: skip
        return list(
            plain(
                target.words, requests=requests or 64, prompt_tokens=prompt_tokens,
                output_tokens=output_tokens, shared=shared, seed=seed,
            )
        )  # fmt: skip

    about = Console(stderr=True, highlight=False)
    is_open = rate is not None or trace is not None
    found, seen = asyncio.run(
        _run(url, api_key, model, made, None if is_open else concurrency, rate, seed, about)
    )
    if report is not None:
        try:
            report.write_text(page(found, seen, f"Load on {url}"), encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"cannot write {report}: {exc.strerror}") from exc
        about.print(f"report: {report}")
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for name, value in lines(found):
            print(f"{name:20} {value}")
    return 0 if found["answers"] == found["requests"] else 6


async def _run(
    url: str,
    api_key: str | None,
    model: str | None,
    made: Any,
    concurrency: int | None,
    rate: float | None,
    seed: int,
    about: Any,
) -> tuple[dict[str, Any], list[Seen]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deepinfer_engine.cli.load.client import Load, counted, meet
    from deepinfer_engine.cli.load.report import summary

    target = await meet(url, api_key, model)
    sessions: list[Session] = made(target)
    total = sum(len(session.turns) for session in sessions)
    before = await counted(target)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=about, transient=True) as progress:
        task = progress.add_task("", total=total, now="")
        failed = 0

        def told(seen: Seen) -> None:
            nonlocal failed
            failed += bool(seen.error)
            now = f"first token {seen.first * 1000:.0f} ms" if seen.first else ""
            progress.update(task, advance=1, now=f"{now}  failed {failed}" if failed else now)

        load = Load(target, told)
        if concurrency is not None:
            seconds = await load.closed(sessions, concurrency)
        else:
            seconds = await load.open(sessions, rate, seed)
    if load.cut:
        about.print(f"{load.cut} prompts were cut to the model's {target.max_model_len} tokens")
    # The last answer is counted when its client has it already.
    after = await _settled(target, before, sum(not one.error for one in load.seen))
    return summary(load.seen, seconds, before, after), load.seen


async def _settled(
    target: Target, before: dict[str, float] | None, answers: int
) -> dict[str, float] | None:
    from deepinfer_engine.cli.load.client import counted

    after = await counted(target)
    for _ in range(20):
        if before is None or after is None or after["answers"] - before["answers"] >= answers:
            break
        await asyncio.sleep(0.05)
        after = await counted(target)
    return after
