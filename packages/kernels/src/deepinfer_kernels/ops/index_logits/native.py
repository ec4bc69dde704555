"""`index_logits` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, dense, torch_form
from deepinfer_kernels.ops.index_logits.reference import index_logits as reference_index_logits


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    if torch_form(q.dtype, (q, k, w), visible):
        return reference_index_logits(q, k, w, visible)
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    q, k, w, visible = dense(q), dense(k), dense(w), dense(visible)
    out = q.new_empty((sequences, queries, entries), dtype=acc_dtype(q.dtype))
    LIBRARY.di_index_logits(
        CODE[q.dtype],
        q.data_ptr(),
        k.data_ptr(),
        w.data_ptr(),
        visible.data_ptr(),
        sequences,
        queries,
        heads,
        dim,
        entries,
        out.data_ptr(),
    )
    return out
