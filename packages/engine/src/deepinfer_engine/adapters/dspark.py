"""Verification, drafts and randomness of deepinfer_dspark, as the runner uses them."""

from __future__ import annotations

from deepinfer_dspark import (
    BudgetScheduler,
    CounterRng,
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

__all__ = [
    "BudgetScheduler",
    "CounterRng",
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
