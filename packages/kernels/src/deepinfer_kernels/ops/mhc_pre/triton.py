# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`mhc_pre`: one program a row, from the flattened streams to the Sinkhorn matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.mhc_pre.reference import mhc_pre as reference_mhc_pre
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def mhc_pre_kernel(
    S, fn, base, scale, mixes, pre, post, comb, K, rms_eps, hc_eps, iters,
    H: tl.constexpr, ROWS: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count: tl.constexpr = H * (H + 2)
    which = tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    squares = tl.zeros((1,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        v = tl.load(S + row * K + cols, mask=cols < K, other=0.0).to(tl.float32)
        both = (which[:, None] < count) & (cols[None, :] < K)
        f = tl.load(fn + which[:, None] * K + cols[None, :], mask=both, other=0.0).to(tl.float32)
        total += tl.sum(f * v[None, :], axis=1)
        squares += tl.sum(v * v, axis=0)
    total *= 1.0 / tl.sqrt(tl.sum(squares, axis=0) / K + rms_eps)
    # The three parts of one vector are read back from memory in their own shapes.
    tl.store(mixes + row * count + which, total, mask=which < count)
    tl.debug_barrier()
    one = tl.arange(0, HP)
    inside = one < H
    own = mixes + row * count
    a = tl.load(own + one, mask=inside, other=0.0) * tl.load(scale).to(tl.float32)
    a += tl.load(base + one, mask=inside, other=0.0).to(tl.float32)
    tl.store(pre + row * H + one, 1.0 / (1.0 + tl.exp(-a)) + hc_eps, mask=inside)
    b = tl.load(own + H + one, mask=inside, other=0.0) * tl.load(scale + 1).to(tl.float32)
    b += tl.load(base + H + one, mask=inside, other=0.0).to(tl.float32)
    tl.store(post + row * H + one, 2.0 / (1.0 + tl.exp(-b)), mask=inside)
    at = 2 * H + one[:, None] * H + one[None, :]
    square = inside[:, None] & inside[None, :]
    m = tl.load(own + at, mask=square, other=0.0) * tl.load(scale + 2).to(tl.float32)
    m += tl.load(base + at, mask=square, other=0.0).to(tl.float32)
    m = tl.where(inside[None, :], m, float("-inf"))
    m = tl.exp(m - tl.max(m, axis=1)[:, None])
    m = m / tl.sum(m, axis=1)[:, None] + hc_eps
    m = tl.where(square, m, 0.0)
    m = m / (tl.sum(m, axis=0)[None, :] + hc_eps)
    for _ in range(1, iters):
        m = m / (tl.sum(m, axis=1)[:, None] + hc_eps)
        m = m / (tl.sum(m, axis=0)[None, :] + hc_eps)
    tl.store(comb + (row * H + one[:, None]) * H + one[None, :], m, mask=square)


def mhc_pre(
    S: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    if torch_form(S, fn, base, scale):
        return reference_mhc_pre(S, fn, base, scale, rms_eps, hc_eps, iters)
    n, h, width = S.shape
    wide = torch.float32
    pre, post = S.new_empty((n, h), dtype=wide), S.new_empty((n, h), dtype=wide)
    comb, mixes = S.new_empty((n, h, h), dtype=wide), S.new_empty((n, h * (h + 2)), dtype=wide)
    launch(
        mhc_pre_kernel,
        (n,),
        S.contiguous(),
        fn.contiguous(),
        base.contiguous(),
        scale.contiguous(),
        mixes,
        pre,
        post,
        comb,
        h * width,
        rms_eps,
        hc_eps,
        iters,
        H=h,
        ROWS=power_of_two(h * (h + 2)),
        HP=power_of_two(h),
        BLOCK=256,
    )
    return pre, post, comb
