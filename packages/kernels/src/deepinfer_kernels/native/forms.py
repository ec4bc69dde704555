"""Python side of the native forms: contiguous tensors in, pointers down, new tensors out.

These run in microseconds, so each does the least it can: the checks are those of
`deepinfer_kernels.ops`. Mixed dtypes and anything that needs a gradient go to the torch form.
Indices are checked in C++: an index past its table raises IndexError and nothing is written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.cpu import indexer as cpu_indexer
from deepinfer_kernels.cpu import mhc as cpu_mhc
from deepinfer_kernels.cpu import moe as cpu_moe
from deepinfer_kernels.cpu import norm as cpu_norm
from deepinfer_kernels.formats import quant
from deepinfer_kernels.formats.records import record_bytes, record_format
from deepinfer_kernels.native.library import load, unavailable
from deepinfer_kernels.reference import (
    attention,
    cache,
    compress,
    engram,
    indexer,
    mhc,
    moe,
    norm,
)

__all__ = [
    "candidate_blocks",
    "candidate_mask",
    "compress_pool",
    "engram_gate",
    "engram_hash",
    "fake_quant",
    "index_logits",
    "kv_load",
    "kv_store",
    "mhc_collapse",
    "mhc_post",
    "mhc_pre",
    "mla_sparse",
    "moe_experts",
    "moe_gate",
    "rms_norm",
    "rope",
    "swiglu",
    "topk_select",
]

_C: Any = load() if unavailable() is None else None
_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_RECORD = {"fp8": 0, "fp4": 1, "index_fp4": 2}
_MAX_STREAMS = 8


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous and of that dtype."""
    if x.dtype is not dtype:
        x = x.to(dtype)
    return x if x.is_contiguous() else x.contiguous()


def _torch_form(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """Whether the call needs the torch form: a gradient, or activations of mixed dtypes."""
    for tensor in tensors:
        if tensor.dtype is not dtype:
            return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _check(status: int, op: str, what: str) -> None:
    if status:
        raise IndexError(f"{op}: {what}")


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    if _torch_form(x.dtype, x) or (weight is not None and _torch_form(x.dtype, weight)):
        return norm.rms_norm(x, weight, eps)
    x, width = _dense(x), x.shape[-1]
    pointer = None if weight is None else _dense(weight).data_ptr()
    out = torch.empty_like(x)
    rows = x.numel() // width if width else 0
    _C.di_rms_norm(_CODE[x.dtype], x.data_ptr(), pointer, eps, rows, width, out.data_ptr())
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    if _torch_form(x.dtype, x):
        return cpu_norm.rope(x, cos, sin, inverse)
    acc = acc_dtype(x.dtype)
    x, cos, sin = _dense(x), _as(cos, acc), _as(sin, acc)
    out = torch.empty_like(x)
    n, dim = x.shape[0], x.shape[-1]
    middle = x.numel() // (n * dim) if n and dim else 0
    _C.di_rope(
        _CODE[x.dtype],
        x.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        inverse,
        n,
        middle,
        dim,
        cos.shape[1],
        out.data_ptr(),
    )
    return out


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    if _torch_form(gate.dtype, gate, up):
        return norm.swiglu(gate, up, limit)
    gate, up = _dense(gate), _dense(up)
    out = torch.empty_like(gate)
    _C.di_swiglu(
        _CODE[gate.dtype], gate.data_ptr(), up.data_ptr(), limit, gate.numel(), out.data_ptr()
    )
    return out


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    if h > _MAX_STREAMS or _torch_form(S.dtype, S):
        return cpu_mhc.mhc_pre(S, fn, base, scale, rms_eps, hc_eps, iters)
    acc = acc_dtype(S.dtype)
    streams, fn, base, scale = _dense(S), _as(fn, acc), _as(base, acc), _as(scale, acc)
    pre = torch.empty((n, h), dtype=acc)
    post = torch.empty((n, h), dtype=acc)
    comb = torch.empty((n, h, h), dtype=acc)
    _C.di_mhc_pre(
        _CODE[S.dtype],
        streams.data_ptr(),
        fn.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        rms_eps,
        hc_eps,
        iters,
        n,
        h,
        width,
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return pre, post, comb


def mhc_collapse(S: Tensor, pre: Tensor) -> Tensor:
    if _torch_form(S.dtype, S):
        return mhc.mhc_collapse(S, pre)
    n, h, width = S.shape
    streams, pre = _dense(S), _as(pre, acc_dtype(S.dtype))
    out = torch.empty((n, width), dtype=S.dtype)
    _C.di_mhc_collapse(
        _CODE[S.dtype], streams.data_ptr(), pre.data_ptr(), n, h, width, out.data_ptr()
    )
    return out


def mhc_post(y: Tensor, S: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    if _torch_form(S.dtype, S, y):
        return cpu_mhc.mhc_post(y, S, post, comb)
    n, h, width = S.shape
    acc = acc_dtype(S.dtype)
    y, streams, post, comb = _dense(y), _dense(S), _as(post, acc), _as(comb, acc)
    out = torch.empty_like(streams)
    _C.di_mhc_post(
        _CODE[S.dtype],
        y.data_ptr(),
        streams.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
        n,
        h,
        width,
        out.data_ptr(),
    )
    return out


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if _torch_form(q.dtype, q, kv):
        return attention.mla_sparse(q, kv, idx, sink, scale)
    n, heads, dim = q.shape
    acc = acc_dtype(q.dtype)
    q, kv, idx, sink = _dense(q), _dense(kv), _dense(idx), _as(sink, acc)
    out = torch.empty_like(q)
    lse = torch.empty((n, heads), dtype=acc)
    status = _C.di_mla_sparse(
        _CODE[q.dtype],
        q.data_ptr(),
        kv.data_ptr(),
        idx.data_ptr(),
        sink.data_ptr(),
        scale,
        n,
        heads,
        dim,
        kv.shape[0],
        idx.shape[1],
        out.data_ptr(),
        lse.data_ptr(),
    )
    _check(status, "mla_sparse", f"an index is past the {kv.shape[0]} rows of kv")
    return out, lse


def index_logits(q: Tensor, k: Tensor, w: Tensor, visible: Tensor) -> Tensor:
    if _torch_form(q.dtype, q, k, w):
        return cpu_indexer.index_logits(q, k, w, visible)
    sequences, queries, heads, dim = q.shape
    entries = k.shape[1]
    q, k, w, visible = _dense(q), _dense(k), _dense(w), _dense(visible)
    out = torch.empty((sequences, queries, entries), dtype=acc_dtype(q.dtype))
    _C.di_index_logits(
        _CODE[q.dtype],
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


def topk_select(x: Tensor, k: int) -> Tensor:
    x = _dense(x)
    rows, columns = x.shape
    out = torch.empty((rows, k), dtype=torch.int64)
    _C.di_topk_select(_CODE[x.dtype], x.data_ptr(), rows, columns, k, out.data_ptr())
    return out


def candidate_blocks(x: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    x, visible = _dense(x), _dense(visible)
    rows, columns = x.shape
    out = torch.empty((rows, -(-columns // block_size)), dtype=torch.bool)
    _C.di_candidate_blocks(
        _CODE[x.dtype],
        x.data_ptr(),
        visible.data_ptr(),
        rows,
        columns,
        block_size,
        topk_blocks,
        out.data_ptr(),
    )
    return out


def candidate_mask(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    if _torch_form(x.dtype, x):
        return indexer.candidate_mask(x, blocks, block_size)
    x, blocks = _dense(x), _dense(blocks)
    out = torch.empty_like(x)
    _C.di_candidate_mask(
        _CODE[x.dtype],
        x.data_ptr(),
        blocks.data_ptr(),
        x.shape[0],
        x.shape[1],
        block_size,
        out.data_ptr(),
    )
    return out


def compress_pool(value: Tensor, gate: Tensor) -> Tensor:
    if _torch_form(value.dtype, value, gate):
        return compress.compress_pool(value, gate)
    m, r, dim = value.shape
    value, gate = _dense(value), _dense(gate)
    out = torch.empty((m, dim), dtype=acc_dtype(value.dtype))
    _C.di_compress_pool(
        _CODE[value.dtype], value.data_ptr(), gate.data_ptr(), m, r, dim, out.data_ptr()
    )
    return out


def kv_store(
    x: Tensor, cache_pages: Tensor, slot: Tensor, record: str, entries: int | None = None
) -> None:
    code = _RECORD.get(record)
    if code is None:
        cache.kv_store(x, cache_pages, slot, record, entries)
        return
    n, dim = x.shape
    record_format(record).check_dim(dim)
    if entries is None:
        entries = cache_pages.shape[1] // record_bytes(record, dim)
    x, slot = _dense(x), _dense(slot)
    status = _C.di_kv_store(
        _CODE[x.dtype],
        x.data_ptr(),
        cache_pages.data_ptr(),
        slot.data_ptr(),
        n,
        dim,
        cache_pages.shape[0],
        cache_pages.stride(0),
        entries,
        code,
    )
    _check(status, "kv_store", _past(cache_pages, entries))


def kv_load(
    cache_pages: Tensor,
    slot: Tensor,
    record: str,
    dim: int,
    dtype: torch.dtype,
    entries: int | None = None,
) -> Tensor:
    code = _RECORD.get(record)
    if code is None:
        return cache.kv_load(cache_pages, slot, record, dim, dtype, entries)
    record_format(record).check_dim(dim)
    if entries is None:
        entries = cache_pages.shape[1] // record_bytes(record, dim)
    slot = _dense(slot)
    out = torch.empty((*slot.shape, dim), dtype=dtype)
    status = _C.di_kv_load(
        _CODE[dtype],
        cache_pages.data_ptr(),
        slot.data_ptr(),
        slot.numel(),
        dim,
        cache_pages.shape[0],
        cache_pages.stride(0),
        entries,
        code,
        out.data_ptr(),
    )
    _check(status, "kv_load", _past(cache_pages, entries))
    return out


def _past(cache_pages: Tensor, entries: int) -> str:
    return f"a slot is past the {cache_pages.shape[0]} pages of {entries} entries"


def fake_quant(x: Tensor, record: str) -> Tensor:
    code = _RECORD.get(record)
    if code is None or _torch_form(x.dtype, x):
        return quant.fake_quant(x, record)
    dim = x.shape[-1]
    record_format(record).check_dim(dim)
    x = _dense(x)
    out = torch.empty_like(x)
    _C.di_fake_quant(_CODE[x.dtype], x.data_ptr(), x.numel() // dim, dim, code, out.data_ptr())
    return out


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    ids, multipliers = _dense(ids), _dense(multipliers)
    primes, offsets = _dense(primes), _dense(offsets)
    n, grams = ids.shape
    heads = primes.shape[1]
    out = torch.empty((n, (grams - 1) * heads), dtype=torch.int64)
    _C.di_engram_hash(
        ids.data_ptr(),
        multipliers.data_ptr(),
        primes.data_ptr(),
        offsets.data_ptr(),
        n,
        grams,
        heads,
        out.data_ptr(),
    )
    return out


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    if _torch_form(S.dtype, S, key, value, q_weight, k_weight):
        return engram.engram_gate(S, key, value, q_weight, k_weight, eps, blocked)
    n, h, width = S.shape
    streams, key, value = _dense(S), _dense(key), _dense(value)
    q_weight, k_weight = _dense(q_weight), _dense(k_weight)
    blocked = None if blocked is None else _dense(blocked)
    out = torch.empty_like(streams)
    _C.di_engram_gate(
        _CODE[S.dtype],
        streams.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        q_weight.data_ptr(),
        k_weight.data_ptr(),
        eps,
        None if blocked is None else blocked.data_ptr(),
        n,
        h,
        width,
        out.data_ptr(),
    )
    return out


def moe_gate(
    x: Tensor, weight: Tensor, bias: Tensor, topk: int, scaling: float
) -> tuple[Tensor, Tensor]:
    if _torch_form(x.dtype, x, weight):
        return moe.moe_gate(x, weight, bias, topk, scaling)
    n, width = x.shape
    experts = weight.shape[0]
    acc = acc_dtype(x.dtype)
    x, weight, bias = _dense(x), _dense(weight), _as(bias, acc)
    idx = torch.empty((n, topk), dtype=torch.int64)
    w = torch.empty((n, topk), dtype=acc)
    _C.di_moe_gate(
        _CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        bias.data_ptr(),
        experts if bias.dim() == 2 else 0,
        topk,
        scaling,
        n,
        width,
        experts,
        idx.data_ptr(),
        w.data_ptr(),
    )
    return idx, w


def moe_experts(
    x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    if _torch_form(x.dtype, x, w1, w3, w2):
        return cpu_moe.moe_experts(x, idx, w, w1, w3, w2, limit)
    n, topk = idx.shape
    experts, inner, width = w1.shape
    x, idx, w = _dense(x), _dense(idx), _as(w, acc_dtype(x.dtype))
    w1, w3, w2 = _dense(w1), _dense(w3), _dense(w2)
    out = torch.empty_like(x)
    status = _C.di_moe_experts(
        _CODE[x.dtype],
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
    _check(status, "moe_experts", f"an expert is outside 0..{experts - 1}")
    return out
