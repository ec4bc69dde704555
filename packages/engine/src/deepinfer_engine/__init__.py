"""deepinfer-engine: a DeepSeek-V4.1 runtime and a prefill/decode disaggregated server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_engine.codec.constraints import choice, ebnf, json_object, json_schema, regex
from deepinfer_engine.core.types import Constraint, TokenLogprob, Usage
from deepinfer_engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ConstraintError,
    ConstraintsUnavailable,
    EngineError,
    EngineLost,
    EngineUnavailable,
    PromptTooLong,
    RequestError,
    SchemaTooComplex,
    TransferError,
    UnknownModel,
)
from deepinfer_engine.offline.llm import LLM
from deepinfer_engine.offline.params import SamplingParams
from deepinfer_engine.offline.results import Completion, Delta

if TYPE_CHECKING:
    from deepinfer_engine.model.v41.api import Model, load_model
    from deepinfer_engine.model.v41.cache import Cache

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "Cache",
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Constraint",
    "ConstraintError",
    "ConstraintsUnavailable",
    "Delta",
    "EngineError",
    "EngineLost",
    "EngineUnavailable",
    "Model",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "SchemaTooComplex",
    "TokenLogprob",
    "TransferError",
    "UnknownModel",
    "Usage",
    "choice",
    "ebnf",
    "json_object",
    "json_schema",
    "load_model",
    "regex",
]

# Importing the package must not import torch: a server's router has no model.
_HEAVY = {"Cache": "model.v41.cache", "Model": "model.v41.api", "load_model": "model.v41.api"}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HEAVY[name]}"), name)
