"""Lossless speculative decoding: verification, budgets, drafters, calibration."""

from deepinfer_dspark.budget import BudgetScheduler, ConfidenceHistory, GroupReducer, survival
from deepinfer_dspark.drafting import DraftBatch, Drafter, sample_drafts
from deepinfer_dspark.errors import (
    CheckpointError,
    DsparkError,
    LosslessnessError,
    ShapeError,
    TableError,
)
from deepinfer_dspark.proposal import Proposal, SparseQ
from deepinfer_dspark.ragged import RaggedIds
from deepinfer_dspark.sampling import Penalties, SamplingBatch
from deepinfer_dspark.step_table import RuntimeCorrection, StepTable
from deepinfer_dspark.uniforms import CounterRng, Uniforms
from deepinfer_dspark.verification import Verifier, VerifyResult

__version__ = "0.1.0"

__all__ = [
    "BudgetScheduler",
    "CheckpointError",
    "ConfidenceHistory",
    "CounterRng",
    "DraftBatch",
    "Drafter",
    "DsparkError",
    "GroupReducer",
    "LosslessnessError",
    "Penalties",
    "Proposal",
    "RaggedIds",
    "RuntimeCorrection",
    "SamplingBatch",
    "ShapeError",
    "SparseQ",
    "StepTable",
    "TableError",
    "Uniforms",
    "Verifier",
    "VerifyResult",
    "sample_drafts",
    "survival",
]
