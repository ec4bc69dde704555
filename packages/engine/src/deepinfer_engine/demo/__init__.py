"""The demo checkpoint shipped with the engine: a toy of the V4.1 architecture, trained here."""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_path"]


def demo_path() -> Path:
    """Folder with `config.json`, `model.safetensors` and the tokenizer files.

    `MODEL_CARD.md` beside them says what it was trained on and what it can and cannot do;
    `training.json` holds the seed, the loss curve and the measured figures.
    """
    return Path(__file__).parent
