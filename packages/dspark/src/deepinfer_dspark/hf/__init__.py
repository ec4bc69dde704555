"""transformers models as target and as draft model (needs the `hf` extra)."""

from deepinfer_dspark.hf.models import HFCausal, HFState, HFTarget

__all__ = ["HFCausal", "HFState", "HFTarget"]
