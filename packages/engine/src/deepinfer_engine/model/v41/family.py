"""The family of DeepSeek V4.1. No torch until a checkpoint is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_engine.model.family import CodecKind, LoadOptions
from deepinfer_engine.model.v41.config import ModelConfig

if TYPE_CHECKING:
    from deepinfer_engine.model.v41.runtime import V41Model
    from deepinfer_engine.model.vision.tower import VisionTower


class DeepseekV41:
    """Implements `Family`."""

    name = "deepseek_v41"
    architectures = ("DeepseekV41ForCausalLM",)
    codec: CodecKind = "deepseek_v41"
    shares_experts = True

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        return ModelConfig.model_validate(raw)

    def load(
        self, model_dir: Path, options: LoadOptions, *, num_blocks: int | None, num_slots: int
    ) -> V41Model:
        from deepinfer_engine.model.v41.runtime import load

        return load(model_dir, options, num_blocks=num_blocks, num_slots=num_slots)

    def load_tower(self, model_dir: Path, options: LoadOptions) -> VisionTower:
        """The vision weights and nothing else. Raises as `load`; ConfigError without a tower."""
        from deepinfer_engine.model.v41.runtime import load_tower

        return load_tower(model_dir, options)
