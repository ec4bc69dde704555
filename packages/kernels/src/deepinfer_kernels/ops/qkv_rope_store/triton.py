# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201, SIM102
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`qkv_rope_store`: one program a head of a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.qkv_rope_store.reference import (
    qkv_rope_store as reference_qkv_rope_store,
)
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def qkv_rope_store_kernel(
    qkv, q_norm, k_norm, cos, sin, keys, values, slot, q, eps,
    key_page, key_entry, key_head, value_page, value_entry, value_head,
    heads, kv_heads, dim, pairs, entries, slots,
    ADJACENT: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < dim
    base = qkv + (row * (heads + 2 * kv_heads) + head) * dim
    raw = tl.load(base + cols, mask=inside, other=0.0)
    own = tl.load(slot + row)
    kept = (own >= 0) & (own < slots)
    written = cols < tl.where(kept, dim, 0)
    page = own // entries
    entry = own % entries
    if head >= heads + kv_heads:
        at = page * value_page + entry * value_entry + (head - heads - kv_heads) * value_head
        tl.store(values + at + cols, raw, mask=written)
    else:
        turned = cols < 2 * pairs
        if ADJACENT:
            other = cols ^ 1
            left = cols % 2 == 0
            pair = cols // 2
        else:
            left = cols < pairs
            other = tl.where(left, cols + pairs, cols - pairs)
            pair = tl.where(left, cols, cols - pairs)
        v = raw.to(tl.float32)
        partner = tl.load(base + other, mask=turned, other=0.0).to(tl.float32)
        is_key = head >= heads
        if Q_NORM:
            if not is_key:
                r = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / dim + eps)
                own_w = tl.load(q_norm + cols, mask=inside, other=0.0).to(tl.float32)
                other_w = tl.load(q_norm + other, mask=turned, other=0.0).to(tl.float32)
                v = (v * r * own_w).to(q.dtype.element_ty).to(tl.float32)
                partner = (partner * r * other_w).to(q.dtype.element_ty).to(tl.float32)
        if K_NORM:
            if is_key:
                r = 1.0 / tl.sqrt(tl.sum(v * v, axis=0) / dim + eps)
                own_w = tl.load(k_norm + cols, mask=inside, other=0.0).to(tl.float32)
                other_w = tl.load(k_norm + other, mask=turned, other=0.0).to(tl.float32)
                v = (v * r * own_w).to(q.dtype.element_ty).to(tl.float32)
                partner = (partner * r * other_w).to(q.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + row * pairs + pair, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + row * pairs + pair, mask=turned, other=0.0).to(tl.float32)
        y = (v * c + tl.where(left, -s, s) * partner).to(q.dtype.element_ty)
        if is_key:
            at = page * key_page + entry * key_entry + (head - heads) * key_head
            tl.store(keys + at + cols, y, mask=written)
        else:
            tl.store(q + (row * heads + head) * dim + cols, y, mask=inside)


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
    if torch_form(qkv, q_norm, k_norm, cos, sin, keys, values):
        return reference_qkv_rope_store(
            qkv, q_norm, k_norm, eps, cos, sin, adjacent, keys, values, slot
        )
    qkv = qkv.contiguous()
    pages, entries, kv_heads, dim = keys.shape
    n, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    q = qkv.new_empty((n, heads, dim))
    launch(
        qkv_rope_store_kernel,
        (n, heads + 2 * kv_heads),
        qkv,
        qkv if q_norm is None else q_norm.contiguous(),
        qkv if k_norm is None else k_norm.contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        keys,
        values,
        slot.contiguous(),
        q,
        eps,
        *keys.stride()[:3],
        *values.stride()[:3],
        heads,
        kv_heads,
        dim,
        cos.shape[1],
        max(entries, 1),
        pages * entries,
        ADJACENT=adjacent,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        BLOCK=power_of_two(dim),
    )
    return q
