"""transformers models as target and as draft model, and their `generate` with drafts."""

from deepinfer_dspark.hf.models import HFCausal, HFState, HFTarget  # names the extra if missing

from deepinfer_dspark.hf.generate import Speculation, generate  # isort: skip
from deepinfer_dspark.hf.tree import HFTreeTarget  # isort: skip

__all__ = ["HFCausal", "HFState", "HFTarget", "HFTreeTarget", "Speculation", "generate"]
