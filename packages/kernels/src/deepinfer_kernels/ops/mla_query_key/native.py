"""`mla_query_key` in C++ (native.cpp)."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.native.call import CODE, LIBRARY, as_dtype, dense, few_rows
from deepinfer_kernels.native.records import record_code
from deepinfer_kernels.ops._parts_cpu import NATIVE
from deepinfer_kernels.ops.mla_query_key.reference import composed


def mla_query_key(
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    record: str,
) -> tuple[Tensor, Tensor, Tensor]:
    if not few_rows(x, (wq_a, wq_b, wkv), q_norm, kv_norm, cos, sin):
        return composed(NATIVE, x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, eps, record)
    acc = acc_dtype(x.dtype)
    n, width = x.shape
    rank, dim = wq_a.shape[0], wkv.shape[0]
    heads = wq_b.shape[0] // dim
    code = record_code(record, dim)
    x, wq_a, wq_b, wkv = dense(x), dense(wq_a), dense(wq_b), dense(wkv)
    q_norm, kv_norm = as_dtype(q_norm, acc), as_dtype(kv_norm, acc)
    cos, sin = as_dtype(cos, acc), as_dtype(sin, acc)
    latent = x.new_empty((n, rank), dtype=x.dtype)
    q = x.new_empty((n, heads, dim), dtype=x.dtype)
    key = x.new_empty((n, dim), dtype=x.dtype)
    LIBRARY.di_mla_query_key(
        CODE[x.dtype],
        x.data_ptr(),
        wq_a.data_ptr(),
        q_norm.data_ptr(),
        wq_b.data_ptr(),
        wkv.data_ptr(),
        kv_norm.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        eps,
        n,
        width,
        rank,
        heads,
        dim,
        cos.shape[1],
        code,
        latent.data_ptr(),
        q.data_ptr(),
        key.data_ptr(),
    )
    return latent, q, key
