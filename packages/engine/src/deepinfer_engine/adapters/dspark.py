"""Verification, drafts and randomness of deepinfer_dspark, as the runner uses them."""

from __future__ import annotations

from deepinfer_dspark import (
    BudgetScheduler,
    CounterRng,
    DraftBatch,
    GroupReducer,
    NGramDrafter,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    StepTable,
    TableError,
    Verifier,
    VerifyResult,
    sample_drafts,
)
from deepinfer_dspark import StepTimes as LearnedStepTimes

__all__ = [
    "BudgetScheduler",
    "CounterRng",
    "DraftBatch",
    "GroupReducer",
    "LearnedStepTimes",
    "NGramDrafter",
    "Penalties",
    "Proposal",
    "RaggedIds",
    "SamplingBatch",
    "StepTable",
    "TableError",
    "Verifier",
    "VerifyResult",
    "sample_drafts",
]
