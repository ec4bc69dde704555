"""The dense family. No torch until a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_engine.model.dense.config import ARCHITECTURES, DenseConfig
from deepinfer_engine.model.family import CodecKind, LoadOptions

if TYPE_CHECKING:
    from deepinfer_engine.model.dense.runtime import DenseModel


class Dense:
    """Implements `Family`."""

    name = "dense"
    architectures = ARCHITECTURES
    codec: CodecKind = "template"

    def read_config(self, raw: Mapping[str, Any]) -> DenseConfig:
        return DenseConfig.model_validate(raw)

    def load(
        self, model_dir: Path, options: LoadOptions, *, num_blocks: int | None, num_slots: int
    ) -> DenseModel:
        from deepinfer_engine.model.dense.runtime import load

        return load(model_dir, options, num_blocks=num_blocks, num_slots=num_slots)
