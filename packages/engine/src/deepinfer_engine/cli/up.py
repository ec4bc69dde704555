"""`deepinfer up`, `status` and `down`: a server on a Ray cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_engine.cli.options import Json

Address = Annotated[str, typer.Option(help="Address of the Ray cluster.")]
Name = Annotated[str, typer.Option(help="Name of the cluster, as its file has it.")]


def up(
    file: Annotated[Path, typer.Argument(metavar="CLUSTER.toml", help="What shall run.")],
    restart: Annotated[
        str | None,
        typer.Option(help="Then restart one role, or all, one process after the other."),
    ] = None,
) -> int:
    """Bring a Ray cluster to what a file says: start what is missing, end what is too many."""
    from deepinfer_engine.cli.cluster.control import bring_up, connected, read_key, roll
    from deepinfer_engine.cli.cluster.spec import ROLES, Role, read_spec

    spec = read_spec(file)
    role: Role | None = next((one for one in ROLES if one == restart), None)
    if restart is not None and restart != "all" and role is None:
        raise typer.BadParameter(f"--restart {restart}: wanted all, {', '.join(ROLES)}")
    key = read_key(spec)
    with connected(spec.address) as ray:
        bring_up(ray, spec, key, _say)
        if restart is not None:
            roll(ray, spec.name, role, _say)
    _say(f"{spec.name} is up; `deepinfer status` shows it")
    return 0


def status(
    name: Name = "deepinfer",
    address: Address = "auto",
    as_json: Json = False,
) -> int:
    """The processes of a cluster: where they are, and what keeps one from running."""
    from deepinfer_engine.cli.cluster.control import connected, look

    with connected(address) as ray:
        found = look(ray, name)
    if as_json:
        print(json.dumps({"name": name, "processes": found}, indent=2))
    else:
        _show(found)
    return 0 if found and not any(one["trouble"] for one in found) else 4


def down(name: Name = "deepinfer", address: Address = "auto") -> int:
    """End a cluster; every process finishes what it runs."""
    from deepinfer_engine.cli.cluster.control import connected, take_down

    with connected(address) as ray:
        count = take_down(ray, name, _say)
    _say(f"{count} processes have ended")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _show(found: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("process", "address", "pid", "restarts", "state"):
        table.add_column(column)
    for one in found:
        state = one["trouble"] or "runs"
        cells = (one["name"], one["address"] or "-", str(one["pid"] or "-"))
        table.add_row(*cells, str(one["restarts"]), state)
    Console(highlight=False).print(table)
    if not found:
        _say("nothing runs under that name")
