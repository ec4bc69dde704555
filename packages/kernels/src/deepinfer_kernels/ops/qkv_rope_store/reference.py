"""Queries turned, keys turned and kept with their values: what stands before an attention."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.ops.rms_norm.reference import rms_norm
from deepinfer_kernels.ops.rope_half.reference import rope_half


def turned(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """x [n, heads, D], its first 2 * cos.shape[1] channels turned."""
    if not adjacent:
        return rope_half(x, cos, sin)
    # Channels 2i and 2i + 1 are the halves of the same rotation, interleaved.
    pairs = cos.shape[1]
    parts = x[..., : 2 * pairs].unflatten(-1, (pairs, 2)).transpose(-1, -2).flatten(-2)
    out = x.clone()
    halves = rope_half(parts, cos, sin).unflatten(-1, (2, pairs))
    out[..., : 2 * pairs] = halves.transpose(-1, -2).flatten(-2)
    return out


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
    kv_heads, entries = keys.shape[2], keys.shape[1]
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q = q if q_norm is None else rms_norm(q, q_norm, eps)
    k = k if k_norm is None else rms_norm(k, k_norm, eps)
    kept = slot >= 0
    at = slot[kept]
    if at.numel() and int(at.max()) >= keys.shape[0] * entries:
        raise IndexError(
            f"qkv_rope_store: a slot is past the {keys.shape[0]} pages of {entries} entries"
        )
    page, entry = at // max(entries, 1), at % max(entries, 1)
    keys[page, entry] = turned(k, cos, sin, adjacent)[kept]
    values[page, entry] = v[kept]
    return turned(q, cos, sin, adjacent).contiguous()
