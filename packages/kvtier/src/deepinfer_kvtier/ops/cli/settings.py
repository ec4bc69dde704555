"""Commands that show and change the policy stored with a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.api.cache import init as change_store
from deepinfer_kvtier.base.config import KVTierConfig, RetentionClass
from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.ops.cli.opening import require, to_look
from deepinfer_kvtier.ops.cli.output import (
    AsJson,
    Store,
    parse_bytes,
    parse_pairs,
    parse_seconds,
    show,
)

Pairs = list[str] | None


def quota(
    store: Store,
    size: Annotated[
        str | None, typer.Option("--bytes", help="Of everything, e.g. 10T; none = no limit.")
    ] = None,
    cls: Annotated[Pairs, typer.Option("--class", help="e.g. scratch=100G; repeatable.")] = None,
    namespace: Annotated[
        Pairs, typer.Option(help="e.g. 1f2e3d4c=1T; `kvtier ls --namespaces` names them.")
    ] = None,
    high: Annotated[float | None, typer.Option(help="Share at which deletion starts.")] = None,
    low: Annotated[float | None, typer.Option(help="Share at which it stops.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the quotas, or change the ones named; deletion is up to the next collection."""
    held = _current(store)
    changes: dict[str, Any] = {}
    if size is not None:
        changes["quota_bytes"] = parse_bytes(size)
    if cls:
        changes["class_quotas"] = _merged(held.class_quotas, cls)
    if namespace:
        changes["namespace_quotas"] = _merged(held.namespace_quotas, namespace)
    if high is not None:
        changes["high_water"] = high
    if low is not None:
        changes["low_water"] = low
    held = _change(store, changes)
    show(
        {
            "quota_bytes": held.quota_bytes,
            "class_quotas": held.class_quotas,
            "namespace_quotas": held.namespace_quotas,
            "high_water": held.high_water,
            "low_water": held.low_water,
        },
        as_json,
    )


def policy(
    store: Store,
    ttl: Annotated[Pairs, typer.Option(help="e.g. agent=30d or pin=never; repeatable.")] = None,
    new_class: Annotated[
        bool, typer.Option("--new-class", help="Names in --ttl that are not there become classes.")
    ] = False,
    floor: Annotated[str | None, typer.Option(help="Age below which eviction is early.")] = None,
    min_free_share: Annotated[
        float | None, typer.Option(help="Of the file system, always left free.")
    ] = None,
    admission: Annotated[str | None, typer.Option(help="all or second_hit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how long what is kept, or change it."""
    held = _current(store)
    changes: dict[str, Any] = {}
    if ttl:
        classes = dict(held.classes)
        unknown = sorted(set(parse_pairs(ttl)) - set(classes))
        if unknown and not new_class:
            raise ConfigError(
                f"no class {', '.join(unknown)} here, there are {', '.join(sorted(classes))};"
                " --new-class makes new ones"
            )
        for name, text in parse_pairs(ttl).items():
            classes[name] = RetentionClass(_code_for(name, classes), parse_seconds(text))
        changes["classes"] = classes
    if floor is not None:
        changes["floor_s"] = parse_seconds(floor)
    if min_free_share is not None:
        changes["min_free_share"] = min_free_share
    if admission is not None:
        changes["admission"] = admission
    held = _change(store, changes)
    show(
        {
            **{f"{name}_ttl_s": entry.ttl_s for name, entry in held.classes.items()},
            "floor_s": held.floor_s,
            "min_free_share": held.min_free_share,
            "admission": held.admission,
        },
        as_json,
    )


def _current(store: Path) -> KVTierConfig:
    require(store)
    with to_look(store) as cache:
        return cache.config


def _change(store: Path, changes: Mapping[str, Any]) -> KVTierConfig:
    if changes:
        change_store(store, **changes)
    return _current(store)


def _merged(held: Mapping[str, int], texts: list[str]) -> dict[str, int]:
    """Quotas with the named ones replaced; `none` removes one."""
    merged: dict[str, int | None] = dict(held)
    merged.update({name: parse_bytes(text) for name, text in parse_pairs(texts).items()})
    return {name: size for name, size in merged.items() if size is not None}


def _code_for(name: str, classes: Mapping[str, RetentionClass]) -> int:
    """The code a class has, or the first free one."""
    if name in classes:
        return classes[name].code
    used = {entry.code for entry in classes.values()}
    return next(code for code in range(256) if code not in used)
