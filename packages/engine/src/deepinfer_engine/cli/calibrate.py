"""`deepinfer calibrate`: measure a model's step times, so that drafts are used where they pay."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from deepinfer_engine.core.device import Device
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console

_DISTURBED = 1.3
"""Spread of the times from which on they are doubtful."""


def run_calibrate(settings: Settings, console: Console) -> None:
    """Measures and saves; prints the table."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from deepinfer_engine.cli.launch import model_dir
    from deepinfer_engine.model.calibration import SEQUENCES, measure, step_key, steps_home
    from deepinfer_engine.model.runner import build_runner

    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device = Device.parse(settings.device)
    runner = build_runner(
        model_dir(settings),
        dtype=settings.dtype,
        nextn=settings.nextn,
        num_blocks=2 * max(SEQUENCES) + 2,
        num_state_slots=max(SEQUENCES) + 2,
        cache_quant=settings.cache_quant,
        device=device,
        batch_invariant=settings.batch_invariant,
    )
    if runner.model.drafts is None:
        raise ConfigError(
            "this model has no draft module: how many drafts copied from its text pay is learned "
            "while it serves, and there is nothing to calibrate"
        )
    if not runner.caps.nextn:
        raise ConfigError("nextn is 0: without drafts there is nothing to calibrate")
    length = runner.caps.nextn
    with Progress(
        TextColumn("measuring"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("", total=None)
        heard = partial(bar.update, task)
        found = measure(
            runner.model, length, heard=lambda done, of: heard(completed=done, total=of)
        )
    times = found.times
    times.save(steps_home(), step_key(runner.model, settings.dtype, device))
    console.print("sequences  forward  with drafts  drafting   (ms of CPU time a thread)")
    for n in SEQUENCES:
        plain, full = times.forward.cost(n), times.forward.cost(n * (1 + length))
        console.print(
            f"{n:9}  {plain:7.2f}  {full:11.2f}  {times.drafting.cost(n):8.2f}", highlight=False
        )
    if found.spread > _DISTURBED:
        console.print(
            f"the times differ {found.spread:.1f} fold from one round to the next: other programs "
            "use these processors; measure again when they are idle",
            highlight=False,
        )
    console.print(f"saved in {steps_home()}", highlight=False)
