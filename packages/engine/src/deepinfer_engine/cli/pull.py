"""`deepinfer pull`: fetch a model before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.names import DEMO, models_home, nearest
from deepinfer_engine.model.pull import KNOWN, hub_snapshot, pull

if TYPE_CHECKING:
    from rich.console import Console


def run_pull(name: str, console: Console) -> None:
    """Prints the model's directory as the only line on standard output."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    if name == DEMO:
        raise ConfigError("demo is part of this package; there is nothing to fetch")
    if name in KNOWN:
        directory = pull(name, models_home(), say)
    elif "/" in name:
        directory = hub_snapshot(name)
    else:
        raise ConfigError(
            f"no model {name!r} is known{nearest(name)}; known are {', '.join(KNOWN)}, and "
            "org/name of the Hugging Face hub"
        )
    say(f"ready: deepinfer serve {name}")
    print(directory)
