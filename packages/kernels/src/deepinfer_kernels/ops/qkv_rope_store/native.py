"""`qkv_rope_store` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, check, dense, torch_form
from deepinfer_kernels.native.pages import heads_of_pages
from deepinfer_kernels.ops.qkv_rope_store.reference import (
    qkv_rope_store as reference_qkv_rope_store,
)


def qkv_rope_store(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    adjacent: bool,
    keys: Tensor,
    values: Tensor,
    slot: Tensor,
) -> Tensor:
    if torch_form(qkv.dtype, (qkv, keys, values), q_norm, k_norm, cos, sin, slot):
        return reference_qkv_rope_store(
            qkv, q_norm, k_norm, eps, cos, sin, adjacent, keys, values, slot
        )
    acc = acc_dtype(qkv.dtype)
    pages, entries, kv_heads, dim = keys.shape
    n, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    qkv, slot, cos, sin = dense(qkv), dense(slot), as_dtype(cos, acc), as_dtype(sin, acc)
    q_norm = None if q_norm is None else as_dtype(q_norm, acc)
    k_norm = None if k_norm is None else as_dtype(k_norm, acc)
    q = qkv.new_empty((n, heads, dim))
    status = LIBRARY.di_qkv_rope_store(
        CODE[qkv.dtype],
        qkv.data_ptr(),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        adjacent,
        *heads_of_pages(keys),
        *heads_of_pages(values),
        slot.data_ptr(),
        pages,
        entries,
        n,
        heads,
        kv_heads,
        dim,
        cos.shape[1],
        q.data_ptr(),
    )
    check(status, "qkv_rope_store", f"a slot is past the {pages} pages of {entries} entries")
    return q
