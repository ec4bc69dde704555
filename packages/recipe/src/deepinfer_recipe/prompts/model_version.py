"""The model versions a conversation can target, and the prompt format of each."""

from __future__ import annotations

from enum import Enum

from deepinfer_recipe.prompts.formats.prompt_format import PromptFormat
from deepinfer_recipe.prompts.formats.v4 import V4
from deepinfer_recipe.prompts.formats.v4_1 import V4_1


class ModelVersion(Enum):
    """The model version a converted conversation targets; it selects the prompt encoding."""

    DeepseekV4Pro = "DeepseekV4Pro"
    """DeepSeek V4 Pro, rendered by `DeepseekV4Encoding`."""
    DeepseekV41Flash = "DeepseekV41Flash"
    """DeepSeek V4.1 Flash, rendered by `DeepseekV41Encoding`."""

    @property
    def prompt_format(self) -> PromptFormat:
        """The prompt format of this version."""
        return V4_1 if self is ModelVersion.DeepseekV41Flash else V4

    def __repr__(self) -> str:
        return f"ModelVersion.{self.name}"
