"""The product with the weights widened, and unless exact with the activations rounded first."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.formats.stored import int8_rounded, widen_weight


def quant_linear(
    x: Tensor, weight: Tensor, stored: str, bias: Tensor | None = None, exact: bool = False
) -> Tensor:
    acc = acc_dtype(x.dtype)
    rounded = not exact and stored != "bf16" and acc is torch.float32
    wide = int8_rounded(x) if rounded else x.to(acc)
    out = wide @ widen_weight(weight, stored, x.shape[1], acc).T
    return (out if bias is None else out + bias.to(acc)).to(x.dtype)
