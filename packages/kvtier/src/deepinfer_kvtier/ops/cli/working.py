"""Commands that delete, move or repair records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from deepinfer_kvtier.api.cache import init as create_store
from deepinfer_kvtier.base.config import Mode
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.log.compaction import reclassify
from deepinfer_kvtier.log.disk import DiskTier
from deepinfer_kvtier.log.namespaces import drop_namespace, namespace_rows, parse_namespace
from deepinfer_kvtier.ops.check import check
from deepinfer_kvtier.ops.cli.opening import disk_of, for_work, require, to_look
from deepinfer_kvtier.ops.cli.output import AsJson, Store, Yes, confirm, parse_bytes, show
from deepinfer_kvtier.ops.migrate import migrate as run_migration


def init(
    store: Store,
    size: Annotated[str | None, typer.Option("--bytes", help="Quota, e.g. 10T.")] = None,
    min_free_share: Annotated[
        float | None, typer.Option(help="Of the file system, always left free.")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="embedded (one machine) or shared-fs (machines on a mount).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create an empty cache directory, or check that one is there."""
    wanted: dict[str, Any] = {}
    if size is not None:
        wanted["quota_bytes"] = parse_bytes(size)
    if min_free_share is not None:
        wanted["min_free_share"] = min_free_share
    create_store(store, mode=mode, **wanted)
    if as_json:
        show({"store": str(store), **wanted}, as_json)
    else:
        typer.echo(f"cache at {store} is ready")


def fsck(
    store: Store,
    repair: Annotated[bool, typer.Option(help="Hide bad records, rewrite bad logs.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check everything; with --repair hide what is bad, so that it is computed and stored again."""
    require(store)
    with for_work(store) if repair else to_look(store) as cache:
        report = check(disk_of(cache), repair=repair)
    show(report.facts(), as_json)
    if not repair and not report.clean:
        raise typer.Exit(1)


def gc(
    store: Store,
    dry_run: Annotated[bool, typer.Option(help="Only say what would go.")] = False,
    quota_bytes: Annotated[
        str | None, typer.Option(help="Keep at most this much in this run, e.g. 100G.")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete by the stored policy. --quota-bytes holds for this run only, and asks before."""
    require(store)
    changes: dict[str, Any] = {}
    if quota_bytes is not None:
        changes["quota_bytes"] = parse_bytes(quota_bytes)
        if not dry_run:
            question = f"Delete what is over {quota_bytes} from {store}?"
            confirm(question, yes=yes)
    with for_work(store, **changes) as cache:
        report = cache.gc(dry_run=dry_run)
        assert report is not None  # a cache with a path has a directory
    show(dataclasses.asdict(report), as_json)


def drop(
    store: Store,
    namespace: Annotated[str, typer.Option(help="Its name in `kvtier ls --namespaces`.")],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Forget everything of one namespace. The space returns with the next collections."""
    require(store)
    parse_namespace(namespace)
    confirm(f"Forget every record of namespace {namespace} in {store}?", yes=yes)
    with for_work(store) as cache:
        disk = disk_of(cache)
        _known(disk, namespace)
        dropped = drop_namespace(disk, namespace)
    show({"namespace": namespace[:8], "dropped": dropped}, as_json)


Key = Annotated[
    list[str] | None, typer.Option(help="First 16 bytes of a digest, as hex; repeatable.")
]
NamespaceName = Annotated[
    str | None, typer.Option(help="All of one namespace, as `kvtier ls --namespaces` names it.")
]


def pin(
    store: Store, namespace: NamespaceName = None, key: Key = None, as_json: AsJson = False
) -> None:
    """Move records to the class `pin`, which never expires and is never evicted."""
    _move(store, namespace, key, "pin", as_json)


def unpin(
    store: Store,
    namespace: NamespaceName = None,
    key: Key = None,
    cls: Annotated[str, typer.Option(help="Class they belong to from now on.")] = "chat",
    as_json: AsJson = False,
) -> None:
    """Move pinned records to a class that expires; their lifetime starts now."""
    _move(store, namespace, key, cls, as_json)


def migrate(
    store: Store,
    target: Annotated[Path, typer.Argument(help="New directory, on any disk.")],
    compression: Annotated[
        str | None, typer.Option(help="Codec for all records: none, zstd-1, shuffle+zstd-1, ...")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a directory again in the current format, without dead records; stop writers first."""
    show(dataclasses.asdict(run_migration(store, target, compression=compression)), as_json)


def _move(
    store: Path, namespace: str | None, keys: list[str] | None, cls: str, as_json: bool
) -> None:
    require(store)
    if (namespace is None) == (not keys):
        raise ConfigError("name what to move: either --namespace or --key")
    with for_work(store) as cache:
        unknown = {cls, "pin"} - set(cache.config.classes)
        if unknown:
            known = sorted(cache.config.classes)
            raise ConfigError(f"unknown class {unknown.pop()!r}: the policy has {known}")
        disk = disk_of(cache)
        rows = _chosen(disk, namespace, keys or [])
        if cls != "pin":
            rows = rows[rows["cls"] == cache.config.classes["pin"].code]
        moved = reclassify(disk, rows, cls)
        disk.seal()
    show({"found": len(rows), "moved": moved, "class": cls}, as_json)


def _known(disk: DiskTier, namespace: str) -> NDArray[Any]:
    """Rows of a namespace. raises: ConfigError for one that has nothing here."""
    disk.refresh()
    found = namespace_rows(disk)
    rows = found.get(parse_namespace(namespace))
    if rows is None:
        there = ", ".join(f"{tag:08x}" for tag in sorted(found)) or "none"
        raise ConfigError(
            f"no records of namespace {namespace[:8]} in {disk.root}: there are {there};"
            " `kvtier namespace` says which one a tenant has"
        )
    return rows


def _chosen(disk: DiskTier, namespace: str | None, keys: list[str]) -> NDArray[Any]:
    if namespace is not None:
        return _known(disk, namespace)
    rows = disk.index.rows()
    wanted: list[int] = []
    for key in keys:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            raw = b""
        if len(raw) != 16:
            raise ConfigError(f"a key is 32 hex digits, got {key!r}")
        lo, hi = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
        wanted.extend(np.flatnonzero((rows["key_lo"] == lo) & (rows["key_hi"] == hi)))
    return rows[wanted]
