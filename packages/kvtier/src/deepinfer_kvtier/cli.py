"""Look at a cache directory, check it, collect it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.cache import Cache, open
from deepinfer_kvtier.cache import init as create_store
from deepinfer_kvtier.clock import SystemClock
from deepinfer_kvtier.config import parse_config
from deepinfer_kvtier.errors import ConfigError, KVTierError
from deepinfer_kvtier.explain import explain_texts, explain_tokens, read_prompt
from deepinfer_kvtier.gc import tidy
from deepinfer_kvtier.io import PosixIo
from deepinfer_kvtier.listing import list_segments
from deepinfer_kvtier.service.command import serve_directory
from deepinfer_kvtier.simulate import read_trace
from deepinfer_kvtier.simulate import simulate as run_simulation
from deepinfer_kvtier.verify import verify as run_verify

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.command("serve-directory")(serve_directory)

Store = Annotated[Path, typer.Argument(help="Directory of the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@app.command()
def init(store: Store) -> None:
    """Create an empty cache directory, or check that one is there."""
    create_store(store)
    typer.echo(f"cache at {store} is ready")


@app.command()
def stat(store: Store, as_json: AsJson = False) -> None:
    """Totals of a directory: records, bytes, index memory."""
    with _inspect(store) as cache:
        segments = list_segments(_directory(cache))
        usage = cache.stats()["disk"]
        facts: dict[str, Any] = {
            "records": usage["entries"],
            "segments": len(segments),
            "writers": len({segment.writer for segment in segments}),
            "payload_bytes": sum(segment.payload_bytes for segment in segments),
            "disk_bytes": sum(segment.disk_bytes for segment in segments),
            "index_memory_bytes": usage["index_bytes"],
            "bad_index_frames": usage["bad_index_frames"],
            "recovery_s": round(cache.recovery_s, 4),
        }
        for cls in sorted({segment.cls for segment in segments}):
            members = [segment for segment in segments if segment.cls == cls]
            facts[f"{cls}_records"] = sum(segment.records for segment in members)
            facts[f"{cls}_disk_bytes"] = sum(segment.disk_bytes for segment in members)
    _print(facts, as_json)


@app.command()
def ls(store: Store, as_json: AsJson = False) -> None:
    """One line for each segment: writer, number, class, records, bytes, age of the last use."""
    with _inspect(store) as cache:
        segments = list_segments(_directory(cache))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(segment) for segment in segments]))
        return
    now = time.time()
    for segment in segments:
        age = f"{now - segment.last_used_s:.0f}s" if segment.records else "-"
        typer.echo(
            f"{segment.writer[:8]} {segment.number:>6} {segment.cls:<8}"
            f" records {segment.records:>7}  bytes {segment.disk_bytes:>13,}  last used {age}"
        )


@app.command()
def verify(
    store: Store,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of records to read.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Which ones, when sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Read records back and compare checksums; exit code 1 when any is bad."""
    with _inspect(store) as cache:
        report = run_verify(_directory(cache), sample=sample, seed=seed)
    _print(dataclasses.asdict(report), as_json)
    if report.bad:
        raise typer.Exit(1)


@app.command()
def fsck(
    store: Store,
    repair: Annotated[bool, typer.Option(help="Hide bad records and adopt dead writers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything; with --repair hide what is bad, so that it is computed and stored again."""
    _require(store)
    with _maintain(store) if repair else _inspect(store) as cache:
        if repair:
            tidy(_directory(cache))
        report = run_verify(_directory(cache), repair=repair)
    _print(dataclasses.asdict(report), as_json)
    if report.bad and not repair:
        raise typer.Exit(1)


@app.command()
def gc(
    store: Store,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    quota_bytes: Annotated[int | None, typer.Option(min=1, help="Keep at most this much.")] = None,
    as_json: AsJson = False,
) -> None:
    """Delete by the stored policy; --quota-bytes holds for this run only."""
    _require(store)
    changes = {} if quota_bytes is None else {"quota_bytes": quota_bytes}
    with _maintain(store, **changes) as cache:
        report = cache.gc(dry_run=dry_run)
        assert report is not None  # a cache with a path has a directory
    _print(dataclasses.asdict(report), as_json)


@app.command()
def explain(
    a: Annotated[Path, typer.Argument(help="First prompt: JSON token ids, or text.")],
    b: Annotated[Path, typer.Argument(help="Second prompt.")],
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 128,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json for texts; needs the package tokenizers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Name the first token that differs and the block from which everything is computed again."""
    first, second = read_prompt(a), read_prompt(b)
    if isinstance(first, str) and isinstance(second, str):
        if tokenizer is None:
            result = explain_texts(first, second)
        else:
            encode = _tokenizer(tokenizer)
            result = explain_tokens(encode(first), encode(second), block_tokens)
    elif isinstance(first, list) and isinstance(second, list):
        result = explain_tokens(first, second, block_tokens)
    else:
        raise ConfigError("one file holds token ids and the other text: give two of a kind")
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(result)))
    else:
        typer.echo("\n".join(result.sentences()))


@app.command()
def simulate(
    trace: Annotated[Path, typer.Option(help="JSON lines: timestamp, input_length, hash_ids.")],
    capacity: Annotated[
        list[int] | None, typer.Option(min=0, help="Blocks to hold; repeatable. Default: no limit.")
    ] = None,
    ttl: Annotated[
        float | None, typer.Option(help="Lifetime in seconds after the last hit.")
    ] = None,
    refresh: Annotated[bool, typer.Option(help="Whether a hit renews the lifetime.")] = True,
    policy: Annotated[
        list[str] | None, typer.Option(help="lru, tail-lru, session, oracle; repeatable.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one id of the trace.")] = 512,
    as_json: AsJson = False,
) -> None:
    """Token hit rate of a trace under capacities, a lifetime and policies."""
    requests = read_trace(trace)
    results: list[dict[str, Any]] = []
    for name in policy or ["tail-lru"]:
        for blocks in capacity or [None]:
            result = run_simulation(
                requests,
                capacity_blocks=blocks,
                ttl_s=ttl,
                refresh=refresh,
                policy=name,
                block_tokens=block_tokens,
            )
            facts = {"policy": name, "capacity_blocks": blocks, **dataclasses.asdict(result)}
            results.append(facts)
            if not as_json:
                limit = "no limit" if blocks is None else f"{blocks:,} blocks"
                typer.echo(f"{name:<9} {limit:>16}  hit rate {result.hit_rate:.4f}")
    if as_json:
        typer.echo(json.dumps(results))


def main() -> None:
    """Entry point of the console script: errors are one line, never a traceback."""
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(1)


def _require(store: Path) -> None:
    if not (store / "FORMAT.json").exists():
        raise ConfigError(f"no cache at {store}: FORMAT.json is missing; check the path")


def _maintain(store: Path, **changes: Any) -> Cache:
    """Open for one piece of work: nothing is collected on the side and no setting is stored."""
    settings = parse_config(store, host_bytes=0, auto_gc=False, **changes)
    return Cache(settings, SystemClock(), PosixIo())


def _inspect(store: Path) -> Cache:
    return open(store, read_only=True, host_bytes=0)


def _directory(cache: Cache) -> Any:
    assert cache.directory is not None  # opened with a path
    return cache.directory


def _tokenizer(path: Path) -> Callable[[str], list[int]]:
    try:
        tokenizers: Any = importlib.import_module("tokenizers")
    except ImportError:
        wanted = "--tokenizer needs the extra: pip install 'deepinfer-kvtier[explain]'"
        raise ConfigError(wanted) from None
    try:
        loaded: Any = tokenizers.Tokenizer.from_file(str(path))
    except Exception as cause:
        raise ConfigError(f"cannot read the tokenizer {path}: {cause}") from cause

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text).ids)

    return encode


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        typer.echo(f"{name:<{width}}  {shown}")
