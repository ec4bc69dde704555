"""Rotary embedding as one complex product."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    acc = acc_dtype(x.dtype)
    pairs = cos.shape[-1]
    # Not conj(): that sets a bit, which products below torch's dispatcher, as under torch.compile,
    # do not look at.
    turn = torch.complex(cos.to(acc), -sin.to(acc) if inverse else sin.to(acc))
    if x.dim() > 2:
        turn = turn.view(x.shape[0], *(1,) * (x.dim() - 2), pairs)
    out = x.clone(memory_format=torch.contiguous_format)
    turned = out[..., x.shape[-1] - 2 * pairs :]
    wide = turned.to(acc, memory_format=torch.contiguous_format, copy=True)
    product = torch.view_as_complex(wide.unflatten(-1, (pairs, 2))) * turn
    turned.copy_(torch.view_as_real(product).flatten(-2))
    return out
