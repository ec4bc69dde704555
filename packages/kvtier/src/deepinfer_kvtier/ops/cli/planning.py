"""Commands that measure, simulate and size."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.base.config import RetentionClass
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.host.policies import ONLINE
from deepinfer_kvtier.log.direct_io import IoName
from deepinfer_kvtier.ops.cli.output import AsJson, parse_pairs, parse_seconds, show
from deepinfer_kvtier.ops.quickbench import run_bench
from deepinfer_kvtier.simulation.plot import line_chart
from deepinfer_kvtier.simulation.simulate import SimulationResult
from deepinfer_kvtier.simulation.simulate import simulate as run_simulation
from deepinfer_kvtier.simulation.sizing import Traffic, size_for
from deepinfer_kvtier.simulation.stretch import DAY_S, StretchLoad, generate
from deepinfer_kvtier.simulation.trace import read_trace

_PETABYTE = 1e15


def bench(
    where: Annotated[Path, typer.Argument(help="Directory on the file system to measure.")],
    blocks: Annotated[int, typer.Option(min=64, help="How many blocks.")] = 1024,
    block_bytes: Annotated[int, typer.Option(min=1, help="Size of one.")] = 113_920,
    io: Annotated[IoName, typer.Option(help="Through the page cache, past it, or 3FS's rings.")] = (
        "posix"
    ),
    as_json: AsJson = False,
) -> None:
    """Put and load blocks beside plain writes and reads of the same bytes."""
    report = run_bench(where, blocks=blocks, block_bytes=block_bytes, io=io)
    show(dataclasses.asdict(report), as_json)


def simulate(
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines: timestamp, input_length, hash_ids.")
    ] = None,
    capacity: Annotated[
        list[int] | None, typer.Option(min=0, help="Blocks to hold; repeatable. Default: no limit.")
    ] = None,
    ttl: Annotated[
        list[str] | None, typer.Option(help="Lifetime after the last hit, e.g. 600 or 3d.")
    ] = None,
    refresh: Annotated[bool, typer.Option(help="Whether a hit renews the lifetime.")] = True,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(ONLINE)}, oracle, or module:Class of your own; repeatable."),
    ] = None,
    as_host: Annotated[
        bool,
        typer.Option(help="Exactly as host memory does it: whole blocks, room before they come."),
    ] = False,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one id of the trace.")] = 512,
    stretch: Annotated[
        bool, typer.Option(help="Days of synthetic load instead of a trace; see --days.")
    ] = False,
    days: Annotated[float, typer.Option(help="Length of the synthetic load.")] = 21.0,
    seed: Annotated[int, typer.Option(help="Of the synthetic load.")] = 1,
    svg: Annotated[
        Path | None, typer.Option(help="Also draw the hit rates into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Token hit rate of a trace under capacities, lifetimes and policies.

    With --stretch: hit rate of each class of a synthetic load, by the days that chat is kept.
    """
    if stretch == (trace is not None):
        raise ConfigError("name the load: either --trace FILE or --stretch")
    if trace is None:
        _stretch(StretchLoad(days=days, seed=seed), ttl or ["1d", "3d", "5d", "7d"], svg, as_json)
        return
    requests = read_trace(trace)
    results: list[dict[str, Any]] = []
    for name in policy or ["tail-lru"]:
        for seconds in [parse_seconds(text) for text in ttl or ["never"]]:
            for blocks in capacity or [None]:
                result = run_simulation(
                    requests,
                    capacity_blocks=blocks,
                    ttl_s=seconds,
                    refresh=refresh,
                    policy=name,
                    as_host=as_host,
                    block_tokens=block_tokens,
                )
                chosen = {"policy": name, "capacity_blocks": blocks, "ttl_s": seconds}
                results.append({**chosen, **dataclasses.asdict(result)})
                if not as_json:
                    typer.echo(_line(name, blocks, seconds, result))
    if as_json:
        typer.echo(json.dumps(results))
    if svg is not None:
        _draw(svg, results, trace.name)


def size(
    tokens_per_day: Annotated[float, typer.Option(help="Prompt tokens of a day, e.g. 155e12.")],
    new_share: Annotated[float, typer.Option(help="Share that no cache had.")] = 0.04,
    bytes_per_token: Annotated[float, typer.Option(help="Of stored blocks.")] = 891.0,
    tokens_per_request: Annotated[float, typer.Option(help="Mean prompt length.")] = 77_000.0,
    cls: Annotated[
        list[str] | None,
        typer.Option("--class", help="share:days by class, e.g. agent=0.25:3; repeatable."),
    ] = None,
    replicas: Annotated[float, typer.Option(help="Copies the storage keeps.")] = 3.0,
    states_per_request: Annotated[
        float, typer.Option(help="Windows that would be stored, were they persisted.")
    ] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Disk that a traffic needs, and what it saves not to store windows."""
    classes = _shares(parse_pairs(cls)) if cls else {"agent": (0.25, 3.0), "chat": (0.75, 7.0)}
    traffic = Traffic(
        tokens_per_day=tokens_per_day,
        new_share=new_share,
        bytes_per_token=bytes_per_token,
        tokens_per_request=tokens_per_request,
        classes=classes,
        replicas=replicas,
        states_per_request=states_per_request,
    )
    found = size_for(traffic)
    if as_json:
        typer.echo(
            json.dumps({"traffic": dataclasses.asdict(traffic), **dataclasses.asdict(found)})
        )
        return
    kept = ", ".join(f"{share:.0%} {name} for {d:g} days" for name, (share, d) in classes.items())
    show(
        {
            "kept": kept,
            "new a day": f"{found.new_bytes_per_day / _PETABYTE:.3g} PB",
            "blocks a day": f"{found.blocks_per_day:.3g}",
            "one copy": f"{found.one_copy_bytes / _PETABYTE:.3g} PB",
            f"disk, {replicas:g} copies": f"{found.disk_bytes / _PETABYTE:.3g} PB",
            "writes": f"{found.write_bytes_per_s / 1e9:.3g} GB/s",
            "reads": f"{found.read_bytes_per_s / 1e9:.3g} GB/s",
            "windows, if persisted": f"{found.window_disk_bytes / _PETABYTE:.3g} PB more,"
            f" {found.window_share:.0%} of everything",
        },
        False,
    )


def _stretch(load: StretchLoad, ttls: Sequence[str], svg: Path | None, as_json: bool) -> None:
    """Hit rates in the second half of a synthetic load; agents are always kept for three days."""
    requests = generate(load)
    results: list[dict[str, Any]] = []
    for text in ttls:
        classes = {
            "chat": RetentionClass(2, parse_seconds(text)),
            "agent": RetentionClass(1, 3 * DAY_S),
        }
        result = run_simulation(
            requests,
            classes=classes,
            block_tokens=load.block_tokens,
            measure_from_s=load.days * DAY_S / 2,
        )
        results.append({"chat_ttl": text, **dataclasses.asdict(result)})
    if as_json:
        typer.echo(json.dumps({"load": dataclasses.asdict(load), "results": results}))
    else:
        _explain_stretch(load, results)
    if svg is not None:
        lines = {
            name: [
                ((parse_seconds(r["chat_ttl"]) or 0) / DAY_S, r["hit_rate_by_class"][name])
                for r in results
                if r["chat_ttl"] != "never"
            ]
            for name in load.habits
        }
        title = "synthetic load: hit rate by days that chat is kept"
        _write(svg, line_chart(lines, title=title, x_label="days"))


def _explain_stretch(load: StretchLoad, results: Sequence[Mapping[str, Any]]) -> None:
    typer.echo(
        f"synthetic load, not measured traffic: {load.days:g} days of {load.sessions_per_day}"
        f" conversations, second half counted; blocks of {load.block_tokens} tokens,"
        f" system prompts Zipf {load.zipf:g}, seed {load.seed}"
    )
    for name, habit in load.habits.items():
        typer.echo(f"  {name}: {', '.join(f'{k} {v:g}' for k, v in _facts(habit).items())}")
    for result in results:
        rates = "  ".join(f"{n} {r:.4f}" for n, r in result["hit_rate_by_class"].items())
        typer.echo(f"chat kept {result['chat_ttl']:>5}, agent 3d  hit rate {rates}")


def _facts(habit: Any) -> dict[str, float]:
    return dataclasses.asdict(habit)


def _line(name: str, blocks: int | None, ttl_s: float | None, result: SimulationResult) -> str:
    limit = "no limit" if blocks is None else f"{blocks:,} blocks"
    kept = "" if ttl_s is None else f"  kept {ttl_s:g} s"
    return f"{name:<9} {limit:>16}{kept}  hit rate {result.hit_rate:.4f}"


def _draw(path: Path, results: Sequence[Mapping[str, Any]], name: str) -> None:
    """By capacity where several were asked for, else by lifetime."""
    key = "capacity_blocks" if len({r["capacity_blocks"] for r in results}) > 1 else "ttl_s"
    lines: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if result[key]:
            lines.setdefault(result["policy"], []).append((result[key], result["hit_rate"]))
    if not lines:
        raise ConfigError("a picture needs several --capacity or several --ttl")
    label = "capacity, blocks" if key == "capacity_blocks" else "lifetime, seconds"
    chart = {policy: sorted(points) for policy, points in lines.items()}
    _write(path, line_chart(chart, title=f"hit rate of {name}", x_label=label))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as cause:
        raise ConfigError(f"cannot write {path}: {cause.strerror}") from cause


def _shares(pairs: Mapping[str, str]) -> dict[str, tuple[float, float]]:
    shares: dict[str, tuple[float, float]] = {}
    for name, text in pairs.items():
        share, colon, days = text.partition(":")
        try:
            if colon:
                shares[name] = float(share), float(days)
                continue
        except ValueError:
            pass
        raise ConfigError(f"a class looks like agent=0.25:3 (share and days), got {name}={text}")
    return shares
