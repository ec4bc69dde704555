"""The wider operators: fused for few rows, composed around torch's linear for many.

One fused call reads each weight once and costs what one small torch operator costs. With many rows
the products dominate, and there oneDNN uses matrix units that portable code cannot name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.composed import Composed
from deepinfer_kernels.native.forms import cache, mhc, moe, norm
from deepinfer_kernels.native.forms.call import CODE, LIBRARY, as_dtype, dense, torch_form

PARTS = Composed(
    norm.rms_norm,
    norm.rope,
    cache.fake_quant,
    norm.swiglu,
    mhc.mhc_pre,
    mhc.mhc_collapse,
    moe.moe_gate,
    moe.moe_experts,
)
_FEW_ROWS = {torch.float32: 24, torch.bfloat16: 24, torch.float64: 48}
"""Most rows of a fused product, by dtype (benches/bench_layer.py)."""


def _few(x: Tensor, *weights: Tensor) -> bool:
    return x.shape[0] <= _FEW_ROWS[x.dtype] and not torch_form(x.dtype, x, *weights)


def mhc_pre_norm(
    S: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, h, width = S.shape
    if h > mhc.MAX_STREAMS or torch_form(S.dtype, S):
        return PARTS.mhc_pre_norm(S, pending, fn, base, scale, norm, eps, hc_eps, iters)
    acc = acc_dtype(S.dtype)
    streams, pending, norm = dense(S), as_dtype(pending, acc), as_dtype(norm, acc)
    fn, base, scale = as_dtype(fn, acc), as_dtype(base, acc), as_dtype(scale, acc)
    x = torch.empty((n, width), dtype=S.dtype)
    pre = torch.empty((n, h), dtype=acc)
    post = torch.empty((n, h), dtype=acc)
    comb = torch.empty((n, h, h), dtype=acc)
    LIBRARY.di_mhc_pre_norm(
        CODE[S.dtype],
        streams.data_ptr(),
        pending.data_ptr(),
        fn.data_ptr(),
        base.data_ptr(),
        scale.data_ptr(),
        norm.data_ptr(),
        eps,
        hc_eps,
        iters,
        n,
        h,
        width,
        x.data_ptr(),
        pre.data_ptr(),
        post.data_ptr(),
        comb.data_ptr(),
    )
    return x, pre, post, comb


def norm_rope_quant(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    if torch_form(x.dtype, x):
        return PARTS.norm_rope_quant(x, weight, eps, cos, sin, record)
    acc = acc_dtype(x.dtype)
    n, dim = x.shape
    code = cache.record_code(record, dim)
    x, weight, cos, sin = dense(x), as_dtype(weight, acc), as_dtype(cos, acc), as_dtype(sin, acc)
    out = torch.empty_like(x)
    LIBRARY.di_norm_rope_quant(
        CODE[x.dtype],
        x.data_ptr(),
        weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        n,
        dim,
        cos.shape[1],
        code,
        out.data_ptr(),
    )
    return out


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
    if not _few(x, wq_a, wq_b, wkv):
        return PARTS.mla_query_key(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, eps, record)
    acc = acc_dtype(x.dtype)
    n, width = x.shape
    rank, dim = wq_a.shape[0], wkv.shape[0]
    heads = wq_b.shape[0] // dim
    code = cache.record_code(record, dim)
    x, wq_a, wq_b, wkv = dense(x), dense(wq_a), dense(wq_b), dense(wkv)
    q_norm, kv_norm = as_dtype(q_norm, acc), as_dtype(kv_norm, acc)
    cos, sin = as_dtype(cos, acc), as_dtype(sin, acc)
    latent = torch.empty((n, rank), dtype=x.dtype)
    q = torch.empty((n, heads, dim), dtype=x.dtype)
    key = torch.empty((n, dim), dtype=x.dtype)
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


def mla_output(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    if not _few(out, wo_a, wo_b):
        return PARTS.mla_output(out, cos, sin, wo_a, wo_b)
    acc = acc_dtype(out.dtype)
    n, heads, dim = out.shape
    groups, rank, _ = wo_a.shape
    out, wo_a, wo_b = dense(out), dense(wo_a), dense(wo_b)
    cos, sin = as_dtype(cos, acc), as_dtype(sin, acc)
    y = torch.empty((n, wo_b.shape[0]), dtype=out.dtype)
    LIBRARY.di_mla_output(
        CODE[out.dtype],
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        wo_a.data_ptr(),
        wo_b.data_ptr(),
        n,
        heads,
        dim,
        cos.shape[1],
        groups,
        rank,
        wo_b.shape[0],
        y.data_ptr(),
    )
    return y


def moe_layer(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_w1: Tensor,
    shared_w3: Tensor,
    shared_w2: Tensor,
    limit: float,
) -> Tensor:
    if not _few(x, w1, w3, w2, shared_w1, shared_w3, shared_w2):
        return PARTS.moe_layer(
            x, gate, bias, topk, scaling, w1, w3, w2, shared_w1, shared_w3, shared_w2, limit
        )
    acc = acc_dtype(x.dtype)
    n, width = x.shape
    experts, inner, _ = w1.shape
    x, gate, bias = dense(x), as_dtype(gate, acc), as_dtype(bias, acc)
    w1, w3, w2 = dense(w1), dense(w3), dense(w2)
    shared_w1, shared_w3, shared_w2 = dense(shared_w1), dense(shared_w3), dense(shared_w2)
    out = torch.empty_like(x)
    LIBRARY.di_moe_layer(
        CODE[x.dtype],
        x.data_ptr(),
        gate.data_ptr(),
        bias.data_ptr(),
        experts if bias.dim() == 2 else 0,
        topk,
        scaling,
        w1.data_ptr(),
        w3.data_ptr(),
        w2.data_ptr(),
        shared_w1.data_ptr(),
        shared_w3.data_ptr(),
        shared_w2.data_ptr(),
        limit,
        n,
        width,
        inner,
        experts,
        shared_w1.shape[0],
        out.data_ptr(),
    )
    return out
