"""A progress bar on standard error for long calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from deepinfer_engine.core.loop import EngineLoop

Tell = Callable[[int, EngineLoop], None]


def _silent(done: int, loop: EngineLoop) -> None:
    """Nobody looks."""


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Generator[Tell]:
    """A call of what it gives shows how many answers are done."""
    if wanted is None:
        wanted = total > 1 and sys.stderr.isatty()
    if not wanted:
        yield _silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("answers", total=total)

        def tell(done: int, loop: EngineLoop) -> None:
            made = int(loop.snapshot()[0].get("generated_tokens", 0))
            bar.update(task, completed=done, description=f"answers, {made:,} tokens")

        yield tell
