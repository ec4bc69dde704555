"""`moe_experts` in C++ (native.cpp)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, check, dense, torch_form
from deepinfer_kernels.ops.moe_experts.reference import moe_experts as reference_moe_experts
from deepinfer_kernels.ops.swiglu.native import swiglu as native_swiglu

_MANY_ROWS = {torch.float32: 96, torch.bfloat16: 48, torch.float64: 1 << 62}
"""From here on torch's products are faster, by dtype."""


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    if torch_form(x.dtype, (x, w1, w3, w2), idx, w):
        return reference_moe_experts(x, idx, w, w1, w3, w2, limit)
    if idx.shape[1] == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    if x.shape[0] >= _MANY_ROWS[x.dtype] and _grouped_takes(w1):
        return _by_segments(x, idx, w, w1, w3, w2, limit)
    n, topk = idx.shape
    experts, inner, width = w1.shape
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


def _grouped_takes(w1: Tensor) -> bool:
    """Whether torch's grouped product is there and takes these widths: rows of whole 16 bytes."""
    aligned = w1.shape[1] * w1.itemsize % 16 == 0 and w1.shape[2] * w1.itemsize % 16 == 0
    return aligned and hasattr(torch.nn.functional, "grouped_mm")


def _rows_apart(w: Tensor) -> Tensor:
    """w with adjacent channels and rows and experts after one another, as the product wants it."""
    expert, row, channel = w.stride()
    whole = 16 // w.itemsize
    fits = channel == 1 and row >= w.shape[2] and expert >= row and row % whole == 0
    return w if fits and expert % whole == 0 and w.data_ptr() % 16 == 0 else w.contiguous()


def _by_segments(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """The rows sorted by expert, one grouped product (oneDNN) a weight."""
    n, topk = idx.shape
    experts, _, width = w1.shape
    x, idx = dense(x), dense(idx)
    expert = idx.reshape(-1).numpy()
    if int(expert.min()) < 0 or int(expert.max()) >= experts:
        raise IndexError(f"moe_experts: an expert is outside 0..{experts - 1}")
    order = np.argsort(expert, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.shape[0])
    ends = torch.from_numpy(np.bincount(expert, minlength=experts).cumsum().astype(np.int32))
    grouped = torch.nn.functional.grouped_mm
    w1, w3, w2 = _rows_apart(w1), _rows_apart(w3), _rows_apart(w2)
    rows = x.index_select(0, torch.from_numpy(order // topk))
    gate = grouped(rows, w1.transpose(1, 2), offs=ends)
    up = grouped(rows, w3.transpose(1, 2), offs=ends)
    down = dense(grouped(native_swiglu(gate, up, limit), w2.transpose(1, 2), offs=ends))
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
