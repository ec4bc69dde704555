"""`search-fetch ARGUMENTS` in a process of its own, forked from one that has read the modules.

A new interpreter needs a second of CPU for them, and these tests run the command seventy times.
What the command does with its arguments, environment, output and exit code is the same. That it
starts from nothing is what the walkthrough and the contract show.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.reduction import DupFd
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(
    [
        "deepinfer_search_fetch.cli",
        "deepinfer_search_fetch.client",
        "deepinfer_search_fetch.index_cli",
        "deepinfer_search_fetch.service.mcp_http",
        "deepinfer_search_fetch.service.run",
        "deepinfer_search_fetch.terminal",
        "forked_command",
    ]
)
# Pages are read in the command's own process, unless a test says otherwise: a worker's start costs
# as much as all the rest.
IN_PROCESS = {"DEEPINFER_SEARCH_FETCH_EXTRACT_WORKERS": "0"}


class Output:
    """A file or terminal as the command's output: it travels to the new process by itself."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(end: Any) -> Output:
    return Output(end.detach())


def _main(arguments: list[str], env: dict[str, str], out: Output, err: Output) -> None:
    os.dup2(out.number, 1)
    os.dup2(err.number, 2)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(n, "wb", 0, closefd=False), "utf-8", write_through=True)  # noqa: SIM115
        for n in (1, 2)
    )
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["search-fetch", *arguments]
    from deepinfer_search_fetch.cli import main

    main()


def start(
    arguments: tuple[str, ...], env: Mapping[str, str], out: int, err: int
) -> multiprocessing.process.BaseProcess:
    """The command, running. out, err: descriptors of the files or terminals it writes to."""
    environ = {**os.environ, **IN_PROCESS, **env}
    values = (list(arguments), environ, Output(out), Output(err))
    process = _FORK.Process(target=_main, args=values)
    process.start()
    return process


def cli(*arguments: str, home: Path | None = None, **env: str) -> CompletedProcess[str]:
    """Run the command to its end. home: its home folder; env: further environment variables."""
    if home is not None:
        arguments = (*arguments, "--home", str(home))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(arguments, env, out.fileno(), err.fileno())
        process.join(120)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        assert code is not None, "the command did not end"
        told = [file.seek(0) or file.read().decode() for file in (out, err)]
        return CompletedProcess(arguments, code, *told)
