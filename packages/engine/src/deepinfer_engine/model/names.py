"""What a user may give as model, and where it is. No torch.

demo                     the embedded toy
smollm2                  a known name, fetched once by `deepinfer pull smollm2`
DIRECTORY, FILE.gguf     what is on disk
org/name                 a repository of the Hugging Face hub, or of that of HF_ENDPOINT
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from deepinfer_engine.demo import demo_path
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.gguf_file import opened
from deepinfer_engine.model.pull import KNOWN, hub_snapshot, pulled

DEMO = "demo"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")


def models_home() -> Path:
    """Where fetched models live: `$XDG_CACHE_HOME/deepinfer/models`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "deepinfer" / "models"


def model_directory(name: str | Path | None) -> Path:
    """The checkpoint directory of a model's name; None is the embedded one.

    Raises CheckpointError saying what is not there and what would be.
    """
    if name is None or str(name) == DEMO:
        return demo_path()
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf" and path.is_file():
        return opened(path, models_home() / "gguf")
    text = str(name)
    if text in KNOWN:
        return pulled(text, models_home())
    if _REPOSITORY.match(text) and not path.parent.is_dir():
        return hub_snapshot(text)
    raise CheckpointError(
        f"{text!r} is no directory and no .gguf file, and no model of that name is known"
        f"{nearest(text)}; names: {DEMO}, {', '.join(KNOWN)}, or org/name of the Hugging Face hub"
    )


def nearest(name: str) -> str:
    """A guess at the known name that was meant, to go into an error; empty without one."""
    near = difflib.get_close_matches(name.lower(), (DEMO, *KNOWN), 1, cutoff=0.75)
    return f", did you mean {near[0]}?" if near else ""
