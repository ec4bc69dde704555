"""Arguments and output that all commands share."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_kvtier.base.errors import ConfigError

Store = Annotated[Path, typer.Argument(help="Directory of the cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def show(facts: dict[str, Any], as_json: bool) -> None:
    """Name and value, a line each; or one JSON object."""
    if as_json:
        typer.echo(json.dumps(facts))
        return
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        typer.echo(f"{name:<{width}}  {shown}")


def confirm(question: str, *, yes: bool) -> None:
    """Go on only with --yes or a yes at the terminal. raises: typer.Exit."""
    if yes:
        return
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo("kvtier: nobody answered; use --yes to go ahead without asking", err=True)
        raise typer.Exit(1) from None
    if not agreed:
        typer.echo("kvtier: nothing was changed", err=True)
        raise typer.Exit(1)


def parse_bytes(text: str) -> int | None:
    """`512`, `64M`, `100GiB`, `10T`: bytes, in powers of 1024; `none` = no limit.

    raises: ConfigError.
    """
    if text == "none":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(?:i?B)?", text)
    if found is None:
        raise ConfigError(f"a size looks like 512, 64M, 100GiB or none, got {text!r}")
    return int(float(found[1]) * _BYTES[found[2]])


def parse_seconds(text: str) -> float | None:
    """`90`, `15m`, `72h`, `30d`: seconds; `never` = no end. raises: ConfigError."""
    if text == "never":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if found is None:
        raise ConfigError(f"a time looks like 90, 15m, 72h, 30d or never, got {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def parse_pairs(texts: Sequence[str] | None) -> dict[str, str]:
    """`name=value` arguments. raises: ConfigError."""
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"expected name=value, got {text!r}")
        pairs[name] = value
    return pairs
