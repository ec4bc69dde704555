"""Reading the tensors of a checkpoint directory, whatever files they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_engine.model.checkpoint import Checkpoint, TensorSpec


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Rows of blocks, uint8 [out, bytes of a row], and the name of their form, such as `q4_1`."""

    rows: Tensor
    form: str


class Weights(Protocol):
    """Every expected tensor is there with the right shape. Close it, or use it in a `with`."""

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read one expected tensor, decoded and cast. Raises CheckpointError for one that is
        damaged or holds NaN."""
        ...

    def stored(self, name: str) -> StoredMatrix | None:
        """A matrix as the file holds it, where products can read it so; else None."""
        ...

    def __enter__(self) -> Weights: ...

    def __exit__(self, *_: object) -> None: ...


def open_weights(
    model_dir: Path,
    expected: Mapping[str, TensorSpec],
    *,
    ignored: re.Pattern[str] | None = None,
) -> Weights:
    """Check names, shapes and types of the whole checkpoint; nothing is read yet.

    expected: without the files' `model.`. ignored: names that may be there although nothing reads
    them.

    A `model.gguf` goes before safetensors. Raises CheckpointError naming what is wrong.
    """
    file = model_dir / "model.gguf"
    if file.exists():
        from deepinfer_engine.model.gguf_weights import GgufWeights

        return GgufWeights(file, expected)
    return Checkpoint(model_dir, expected, ignored=ignored)
