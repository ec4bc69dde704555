"""Reading the tensors of a checkpoint directory, whatever files they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_engine.model.checkpoint import Checkpoint, TensorSpec


class Weights(Protocol):
    """Every expected tensor is there with the right shape. Close it, or use it in a `with`."""

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one expected tensor, decoded and cast. Raises CheckpointError for one that is
        damaged or holds NaN."""
        ...

    def __enter__(self) -> Weights: ...

    def __exit__(self, *_: object) -> None: ...


def open_weights(
    model_dir: Path, expected: Mapping[str, TensorSpec], *, ignored: re.Pattern[str]
) -> Weights:
    """Check names, shapes and types of the whole checkpoint; nothing is read yet.

    A `model.gguf` goes before safetensors. Raises CheckpointError naming what is wrong.
    """
    file = model_dir / "model.gguf"
    if file.exists():
        from deepinfer_engine.model.gguf_weights import GgufWeights

        return GgufWeights(file, expected)
    return Checkpoint(model_dir, expected, ignored=ignored)
