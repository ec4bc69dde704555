"""Lossless speculative decoding: verification, budgets, drafters, calibration."""

from deepinfer_dspark.budget import BudgetScheduler, ConfidenceHistory, GroupReducer, survival
from deepinfer_dspark.calibration import CalibrationReport, Calibrator
from deepinfer_dspark.drafters.mixed import CausalModel, DraftModelDrafter, MixedDrafter
from deepinfer_dspark.drafters.ngram import NGramDrafter
from deepinfer_dspark.drafters.trees import DraftModelTree, TreeShape
from deepinfer_dspark.drafting import DraftBatch, Drafter, sample_drafts
from deepinfer_dspark.errors import (
    CheckpointError,
    DsparkError,
    LosslessnessError,
    ShapeError,
    TableError,
    UnsupportedModelError,
)
from deepinfer_dspark.gate import SpeculationGate
from deepinfer_dspark.loop import Generation, SpecLoop, Target, TargetOutput
from deepinfer_dspark.proposal import Proposal, SparseQ
from deepinfer_dspark.ragged import RaggedIds
from deepinfer_dspark.sampling import Penalties, SamplingBatch
from deepinfer_dspark.step_table import RuntimeCorrection, StepTable
from deepinfer_dspark.step_times import StepTimes
from deepinfer_dspark.tree import TokenTree, TreeResult, verify_tree
from deepinfer_dspark.tree_loop import TreeDrafter, TreeGeneration, TreeLoop, TreeTarget
from deepinfer_dspark.uniforms import CounterRng, Uniforms
from deepinfer_dspark.verification import Verifier, VerifyResult

__version__ = "0.2.0"

__all__ = [
    "BudgetScheduler",
    "CalibrationReport",
    "Calibrator",
    "CausalModel",
    "CheckpointError",
    "ConfidenceHistory",
    "CounterRng",
    "DraftBatch",
    "DraftModelDrafter",
    "DraftModelTree",
    "Drafter",
    "DsparkError",
    "Generation",
    "GroupReducer",
    "LosslessnessError",
    "MixedDrafter",
    "NGramDrafter",
    "Penalties",
    "Proposal",
    "RaggedIds",
    "RuntimeCorrection",
    "SamplingBatch",
    "ShapeError",
    "SparseQ",
    "SpecLoop",
    "SpeculationGate",
    "StepTable",
    "StepTimes",
    "TableError",
    "Target",
    "TargetOutput",
    "TokenTree",
    "TreeDrafter",
    "TreeGeneration",
    "TreeLoop",
    "TreeResult",
    "TreeShape",
    "TreeTarget",
    "Uniforms",
    "UnsupportedModelError",
    "Verifier",
    "VerifyResult",
    "sample_drafts",
    "survival",
    "verify_tree",
]
