"""deepinfer-engine: a DeepSeek-V4.1 runtime and a prefill/decode disaggregated server."""

from __future__ import annotations

from deepinfer_engine.core.types import SamplingParams, TokenLogprob, Usage
from deepinfer_engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
    TransferError,
    UnknownModel,
)
from deepinfer_engine.llm import LLM, Completion

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "EngineError",
    "EngineLost",
    "EngineUnavailable",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
    "TransferError",
    "UnknownModel",
    "Usage",
]
