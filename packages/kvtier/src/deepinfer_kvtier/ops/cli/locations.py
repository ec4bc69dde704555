"""`kvtier serve-locations`: one shard of the location service as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.remote.location import DEFAULT_PORT

MIN_KEY_BYTES = 16


def serve_locations(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 = any free one.")] = DEFAULT_PORT,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the shared key; needed beyond loopback.")
    ] = None,
    max_entries: Annotated[
        int, typer.Option(min=1, help="Hints kept; the oldest go first.")
    ] = 2_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as JSON.")] = False,
) -> None:
    """Serve one shard of the location service until it is told to stop (experimental)."""
    key = b"" if key_file is None else read_key(key_file)
    # Other commands need no event loop, and `--help` should not wait for one.
    from deepinfer_kvtier.remote.location.server import run_until_told

    def started(url: str) -> None:
        typer.echo(json.dumps({"url": url}) if as_json else f"location service at {url}")

    run_until_told(host, port, key=key, max_entries=max_entries, started=started)


def read_key(path: Path) -> bytes:
    """The shared key in a file, without its last line break. raises: ConfigError."""
    try:
        key = path.read_bytes().removesuffix(b"\n")
    except OSError as cause:
        raise ConfigError(f"cannot read the key file {path}: {cause.strerror}") from cause
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{path} needs at least {MIN_KEY_BYTES} bytes, got {len(key)}")
    return key
