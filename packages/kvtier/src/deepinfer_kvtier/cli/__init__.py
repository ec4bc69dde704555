"""Look at a cache directory, keep it in order, and plan its size."""

from __future__ import annotations

import sys

import typer

from deepinfer_kvtier.cli import inspecting, planning, prompts, settings, working
from deepinfer_kvtier.errors import KVTierError
from deepinfer_kvtier.service.command import serve_directory

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
for command in (
    *(working.init, inspecting.stat, inspecting.ls, inspecting.verify, working.fsck, working.gc),
    *(settings.quota, settings.policy, working.pin, working.unpin, working.drop),
    *(working.migrate, inspecting.warm, planning.bench, planning.simulate, planning.size),
    prompts.explain,
):
    app.command()(command)
app.command("serve-directory")(serve_directory)


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
