"""`moe_experts` in C++ (native.cpp)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import (
    CODE,
    LIBRARY,
    as_dtype,
    check,
    dense,
    many_rows,
    torch_form,
)
from deepinfer_kernels.native.library import unavailable
from deepinfer_kernels.ops.moe_experts.reference import moe_experts as reference_moe_experts
from deepinfer_kernels.ops.swiglu.native import swiglu as native_swiglu

_LARGE_PRODUCT = 1 << 21
"""Multiplications of an expert's product from which torch's are faster, their calls included."""

_HAS_DOT = unavailable() is None and bool(LIBRARY.di_moe_takes_dot(CODE[torch.bfloat16]))


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    if torch_form(x.dtype, (x, w1, w3, w2), idx, w):
        return reference_moe_experts(x, idx, w, w1, w3, w2, limit)
    if idx.shape[1] == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    n, topk = idx.shape
    experts, inner, width = w1.shape
    large = many_rows(n * topk * inner * width, _LARGE_PRODUCT * experts)
    if large and _takes_dots(x, (w1, w3, w2)):
        return _by_dots(x, idx, w, w1, w3, w2, limit)
    if large and x.dtype is not torch.float64:
        return _by_segments(x, idx, w, w1, w3, w2, limit)
    x, idx, w = dense(x), dense(idx), as_dtype(w, acc_dtype(x.dtype))
    w1, w3, w2 = dense(w1), dense(w3), dense(w2)
    out = torch.empty_like(x)
    status = LIBRARY.di_moe_experts(
        CODE[x.dtype],
        x.data_ptr(),
        idx.data_ptr(),
        w.data_ptr(),
        w1.data_ptr(),
        w3.data_ptr(),
        w2.data_ptr(),
        limit,
        n,
        topk,
        width,
        inner,
        experts,
        out.data_ptr(),
    )
    check(status, "moe_experts", f"an expert is outside 0..{experts - 1}")
    return out


def _takes_dots(x: Tensor, weights: tuple[Tensor, ...]) -> bool:
    """Whether the rows are bfloat16, and pairs of channels adjacent in every weight."""
    if x.dtype is not torch.bfloat16 or not _HAS_DOT:
        return False
    return all(t.stride(2) == 1 and t.shape[2] % 2 == 0 and not t.is_neg() for t in weights)


def _by_dots(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """The rows sorted by expert, all in one call: dot products of bfloat16 pairs."""
    n, topk = idx.shape
    experts, inner, width = w1.shape
    x, idx, w = dense(x), dense(idx), as_dtype(w, torch.float32)
    out = torch.empty_like(x)
    status = LIBRARY.di_moe_experts_dot(
        x.data_ptr(),
        idx.data_ptr(),
        w.data_ptr(),
        w1.data_ptr(),
        *w1.stride()[:2],
        w3.data_ptr(),
        *w3.stride()[:2],
        w2.data_ptr(),
        *w2.stride()[:2],
        limit,
        n,
        topk,
        width,
        inner,
        experts,
        out.data_ptr(),
    )
    check(status, "moe_experts", f"an expert is outside 0..{experts - 1}")
    return out


def _by_segments(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """The rows sorted by expert; of each expert three products (oneDNN), in cache all three."""
    n, topk = idx.shape
    experts, _, width = w1.shape
    x, idx = dense(x), dense(idx)
    expert = idx.reshape(-1).numpy()
    if int(expert.min()) < 0 or int(expert.max()) >= experts:
        raise IndexError(f"moe_experts: an expert is outside 0..{experts - 1}")
    order = np.argsort(expert, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    rows = x.index_select(0, torch.from_numpy(order // topk))
    down = torch.empty_like(rows)
    begin = 0
    for e, end in enumerate(np.bincount(expert, minlength=experts).cumsum().tolist()):
        if end > begin:
            own = rows[begin:end]
            hidden = native_swiglu(linear(own, w1[e]), linear(own, w3[e]), limit)
            torch.mm(hidden, w2[e].t(), out=down[begin:end])
        begin = end
    w = as_dtype(w, acc_dtype(x.dtype))
    out = x.new_empty((n, width), dtype=x.dtype)
    LIBRARY.di_moe_combine(
        CODE[x.dtype],
        down.data_ptr(),
        place.ctypes.data,
        w.data_ptr(),
        n,
        topk,
        width,
        out.data_ptr(),
    )
    return out
