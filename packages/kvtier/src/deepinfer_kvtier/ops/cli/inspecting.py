"""Commands that look at a directory and change nothing."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.base.identity import Shard
from deepinfer_kvtier.base.values import LayoutSpec, parts
from deepinfer_kvtier.log.namespaces import list_namespaces, namespace_rows, parse_namespace
from deepinfer_kvtier.ops.check import verify as run_verify
from deepinfer_kvtier.ops.cli.opening import disk_of, to_look
from deepinfer_kvtier.ops.cli.output import AsJson, Store, parse_bytes, show
from deepinfer_kvtier.ops.listing import list_segments, warm_up


def stat(store: Store, as_json: AsJson = False) -> None:
    """Totals of a directory: records, bytes, index memory."""
    with to_look(store) as cache:
        segments = list_segments(disk_of(cache))
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
    show(facts, as_json)


def ls(
    store: Store,
    namespaces: Annotated[bool, typer.Option(help="A line for each namespace instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """One line for each segment: writer, number, class, records, bytes, age of the last use."""
    if namespaces:
        _ls_namespaces(store, as_json)
        return
    with to_look(store) as cache:
        segments = list_segments(disk_of(cache))
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


def verify(
    store: Store,
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of records to read.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Which ones, when sampling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Read records back and compare checksums; exit code 1 when any is bad."""
    with to_look(store) as cache:
        report = run_verify(disk_of(cache), sample=sample, seed=seed)
    show(dataclasses.asdict(report), as_json)
    if report.bad:
        raise typer.Exit(1)


def warm(
    store: Store,
    size: Annotated[str, typer.Option("--bytes", help="How much to read, e.g. 8G.")] = "1G",
    as_json: AsJson = False,
) -> None:
    """Read the records used last, so that the operating system has them in memory."""
    limit = parse_bytes(size)
    with to_look(store) as cache:
        report = warm_up(disk_of(cache), 1 << 62 if limit is None else limit)
    show(dataclasses.asdict(report), as_json)


def _ls_namespaces(store: Path, as_json: bool) -> None:
    with to_look(store) as cache:
        listed = list_namespaces(disk_of(cache))
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(usage) for usage in listed]))
        return
    for usage in listed:
        typer.echo(f"{usage.name}  records {usage.records:>9,}  bytes {usage.disk_bytes:>15,}")


def namespace(
    store: Store,
    model: Annotated[str, typer.Option(help="As the engine names it: an id, or JSON.")],
    layout: Annotated[
        Path, typer.Option(help='JSON: {"block_tokens": 128, "block": {"kv": 113920}, "state": {}}')
    ],
    salt: Annotated[str, typer.Option(help="The tenant.")] = "",
    numerics: Annotated[str, typer.Option(help="As the engine says it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show which namespace a tenant of a model has: `ls`, `drop`, `pin` and quotas go by its name.

    What else the engine makes part of the identity (adapters, shard, rope, ...) is given in the
    layout's file under its own name; `Namespace.id` of a running engine is the same name.
    """
    try:
        given: dict[str, Any] = json.loads(layout.read_text())
        kinds = {k: parts(*given[k].items()) for k in ("block", "state") if given.get(k)}
        spec = LayoutSpec(given["block_tokens"], kinds)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise ConfigError(f"cannot use the layout {layout}: {cause!r}") from None
    more = {
        name: given[name]
        for name in ("adapters", "quantisation", "rope", "tables")
        if name in given
    }
    if "shard" in given:
        more["shard"] = Shard(*given["shard"])
    with to_look(store) as cache:
        identity = json.loads(model) if model.lstrip().startswith("{") else model
        ns = cache.namespace(spec, model=identity, salt=salt, numerics=numerics, **more)
        rows = namespace_rows(disk_of(cache)).get(parse_namespace(ns.id))
    show(
        {"namespace": ns.id[:8], "id": ns.id, "records": 0 if rows is None else len(rows)}, as_json
    )
