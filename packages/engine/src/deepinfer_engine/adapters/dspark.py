"""Verification, drafts and randomness of deepinfer_dspark, as the runner uses them."""

from __future__ import annotations

from deepinfer_dspark import (
    CounterRng,
    Penalties,
    Proposal,
    RaggedIds,
    SamplingBatch,
    Verifier,
    VerifyResult,
    sample_drafts,
)

__all__ = [
    "CounterRng",
    "Penalties",
    "Proposal",
    "RaggedIds",
    "SamplingBatch",
    "Verifier",
    "VerifyResult",
    "sample_drafts",
]
