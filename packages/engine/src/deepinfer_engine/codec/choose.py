"""The codec of a model, by its family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_engine.codec.recipe_codec import RecipeCodec


def open_codec(model_dir: Path, model_names: Sequence[str], **options: Any) -> RecipeCodec:
    """For a checkpoint directory; options as `RecipeCodec.from_directory`.

    Raises CheckpointError: no readable tokenizer, or a model that nothing here runs.
    """
    return RecipeCodec.from_directory(model_dir, model_names, **options)
