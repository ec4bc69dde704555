"""Look at a cache directory, keep it in order, and plan its size."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from deepinfer_kvtier.base.errors import KVTierError
from deepinfer_kvtier.ops.cli import inspecting, planning, prompts, settings, working
from deepinfer_kvtier.ops.cli.locations import serve_locations

app = typer.Typer(add_completion=False, help=__doc__)
# Typer's public names have the leaf only; all wrong arguments are of this kind.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
for command in (
    *(
        working.init,
        inspecting.stat,
        inspecting.ls,
        inspecting.verify,
        inspecting.namespace,
        working.fsck,
        working.gc,
    ),
    *(settings.quota, settings.policy, working.pin, working.unpin, working.drop),
    *(working.migrate, inspecting.warm, planning.bench, planning.simulate, planning.size),
    prompts.explain,
):
    app.command()(command)
app.command("serve-locations")(serve_locations)


def _say_version(asked: bool) -> None:
    if asked:
        from deepinfer_kvtier import __version__

        print(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script: errors are one line, never a traceback."""
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Abort:
        sys.exit(1)
    except BrokenPipeError:
        # `kvtier ls DIR | head` has closed our output: nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KVTierError, _UsageError) as error:
        text = error.format_message() if isinstance(error, _UsageError) else str(error)  # type: ignore[attr-defined]
        print(f"kvtier: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(code)
