"""Codec for DeepSeek V4 and V4.1: requests of three public protocols in, their events out."""

from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.encoding import DeepseekV4Encoding, DeepseekV41Encoding
from deepinfer_recipe.messages import (
    AssistantMessage,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)
from deepinfer_recipe.model_version import ModelVersion
from deepinfer_recipe.render import RenderedPrompt
from deepinfer_recipe.special_tokens import IMAGE_SPECIAL_TOKEN_ID, SpecialToken, SpecialTokens
from deepinfer_recipe.tokenizer import Tokenizer
from deepinfer_recipe.training import TrainingText, render_training

__version__ = "0.1.0"

__all__ = [
    "IMAGE_SPECIAL_TOKEN_ID",
    "AssistantMessage",
    "Conversation",
    "DeepseekV4Encoding",
    "DeepseekV41Encoding",
    "LatestReminderMessage",
    "Message",
    "ModelVersion",
    "RenderedPrompt",
    "SpecialToken",
    "SpecialTokens",
    "SystemMessage",
    "Tokenizer",
    "ToolCall",
    "ToolDefinition",
    "ToolMessage",
    "TrainingText",
    "UserMessage",
    "__version__",
    "render_training",
]
