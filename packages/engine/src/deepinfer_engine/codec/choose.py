"""The codec of a model, by its family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_engine.adapters.recipe import TemplateModel, TemplateUnusableError
from deepinfer_engine.codec.grammars import RecipeGrammars
from deepinfer_engine.codec.recipe_codec import RecipeCodec, TemplateTarget
from deepinfer_engine.core.sampling_params import SamplingDefaults
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.files import sampling_defaults
from deepinfer_engine.model.registry import load_family_config


def open_codec(
    model_dir: Path, model_names: Sequence[str], *, own_defaults: bool = True, **options: Any
) -> RecipeCodec:
    """For a checkpoint directory; options as `RecipeCodec.from_directory`.

    own_defaults: take sampling defaults from the model's generation_config.json.

    Raises CheckpointError: no readable tokenizer or template, or a model that nothing here runs.
    """
    family, config = load_family_config(model_dir)
    target = None
    if family.codec == "template":
        target = TemplateTarget(_template(model_dir), config.eos_token_ids)
    defaults = sampling_defaults(model_dir) if own_defaults else SamplingDefaults()
    return RecipeCodec.from_directory(
        model_dir, model_names, target=target, defaults=defaults, **options
    )


def open_grammars(model_dir: Path, vocab_size: int, **options: Any) -> RecipeGrammars:
    """The compiler of constraints for a model; options as `RecipeGrammars`. Loads nothing yet.

    Raises ConstraintsUnavailable where xgrammar is not installed.
    """
    family, config = load_family_config(model_dir)
    ends = config.eos_token_ids if family.codec == "template" else None
    path = model_dir / "tokenizer.json"
    return RecipeGrammars(path, vocab_size, eos_token_ids=ends, **options)


def _template(model_dir: Path) -> TemplateModel | None:
    """The chat template; a base model has none, and says so when it is asked to chat."""
    try:
        return TemplateModel.from_directory(model_dir)
    except TemplateUnusableError as error:
        if "has no chat template" in str(error):
            return None
        raise CheckpointError(f"{model_dir}: {error}") from error
