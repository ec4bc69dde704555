"""torch for the modules that need it, or an error that names the extra to install."""

from __future__ import annotations

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
except ModuleNotFoundError as e:
    if e.name != "torch":
        raise
    raise ModuleNotFoundError(
        "this module of deepinfer_dspark needs torch: pip install './packages/dspark[torch]'",
        name="torch",
    ) from None

__all__ = ["Tensor", "functional", "nn", "torch", "wide"]


def wide(x: Tensor) -> Tensor:
    """x in the dtype of sums and logits: float64 for float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()
