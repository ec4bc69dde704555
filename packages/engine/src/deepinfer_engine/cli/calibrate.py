"""`deepinfer calibrate`: measure a model's step times, so that drafts are used where they pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_engine.core.device import Device
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.settings import Settings

if TYPE_CHECKING:
    from rich.console import Console


def run_calibrate(settings: Settings, console: Console) -> None:
    """Measures and saves; prints the table."""
    import torch

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
    )
    if runner.model.drafts is None:
        raise ConfigError(
            "this model has no draft module: how many drafts copied from its text pay is learned "
            "while it serves, and there is nothing to calibrate"
        )
    if not runner.caps.nextn:
        raise ConfigError("nextn is 0: without drafts there is nothing to calibrate")
    length = runner.caps.nextn
    times = measure(runner.model, length)
    times.save(steps_home(), step_key(runner.model, settings.dtype, device))
    console.print("sequences  forward  with drafts  drafting   (ms of CPU time a thread)")
    for n in SEQUENCES:
        plain, full = times.forward.cost(n), times.forward.cost(n * (1 + length))
        console.print(
            f"{n:9}  {plain:7.2f}  {full:11.2f}  {times.drafting.cost(n):8.2f}", highlight=False
        )
    console.print(f"saved in {steps_home()}", highlight=False)
