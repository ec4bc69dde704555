# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`quant_linear`: weights are widened in registers, block by block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.formats.stored import PACKED, STORED
from deepinfer_kernels.ops.quant_linear.reference import quant_linear as reference_quant_linear
from deepinfer_kernels.triton_support.lang import half_at, nearest
from deepinfer_kernels.triton_support.launch import launch, torch_form


@triton.jit
def quant_linear_kernel(
    x, weight, bias, out, n, m, k, row_bytes,
    STORED: tl.constexpr, BYTES: tl.constexpr, ROUNDED: tl.constexpr, HAS_BIAS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    column = tl.program_id(1) * N + tl.arange(0, N)
    within = tl.arange(0, 32)
    total = tl.zeros((M, N), dtype=tl.float32)
    here = (column < m)[:, None]
    line = weight + column.to(tl.int64)[:, None] * row_bytes
    for block in range((k + 31) // 32):
        cols = block * 32 + within
        inside = (row < n)[:, None] & (cols < k)[None, :]
        at = row.to(tl.int64)[:, None] * k + cols[None, :]
        v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if ROUNDED:
            most = tl.max(tl.abs(v), axis=1)
            safe = tl.where(most > 0.0, most, 1.0)
            inverse = tl.where(most > 0.0, tl.div_rn(tl.full((M,), 127.0, tl.float32), safe), 0.0)
            step = tl.div_rn(most, tl.full((M,), 127.0, tl.float32))
            v = nearest(v * inverse[:, None]) * step[:, None]
        if STORED == 3:
            low = tl.load(line + 2 * cols[None, :], mask=here & (cols < k)[None, :], other=0)
            high = tl.load(line + 2 * cols[None, :] + 1, mask=here & (cols < k)[None, :], other=0)
            bits = (low.to(tl.int32) << 16) | (high.to(tl.int32) << 24)
            wide = bits.to(tl.float32, bitcast=True)
        else:
            base = line + block * BYTES
            scale = half_at(base, here)
            if STORED == 0:
                q = tl.load(base + 2 + within[None, :], mask=here, other=0).to(tl.int32)
                wide = scale * tl.where(q > 127, q - 256, q).to(tl.float32)
            else:
                HEAD: tl.constexpr = 2 if STORED == 1 else 4
                q = tl.load(base + HEAD + (within % 16)[None, :], mask=here, other=0).to(tl.int32)
                q = (q >> (within // 16 * 4)[None, :]) & 15
                if STORED == 1:
                    wide = scale * (q - 8).to(tl.float32)
                else:
                    wide = scale * q.to(tl.float32) + half_at(base + 2, here)
        total += tl.dot(v, tl.trans(wide), input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < m, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * m + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < n)[:, None] & (column < m)[None, :])


_STORED = {"q8_0": 0, "q4_0": 1, "q4_1": 2, "bf16": 3}


def quant_linear(
    x: Tensor, weight: Tensor, stored: str, bias: Tensor | None = None, exact: bool = False
) -> Tensor:
    if torch_form(x, bias) or stored.endswith(PACKED):
        return reference_quant_linear(x, weight, stored, bias, exact)
    n, k = x.shape
    m = weight.shape[0]
    x = x.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    out = x.new_empty((n, m))
    launch(
        quant_linear_kernel,
        (triton.cdiv(n, 16), triton.cdiv(m, 32)),
        x,
        weight,
        x if bias is None else bias.contiguous(),
        out,
        n,
        m,
        k,
        weight.stride(0),
        STORED=_STORED[stored],
        BYTES=STORED.get(stored, 0),
        ROUNDED=not exact and stored != "bf16",
        HAS_BIAS=bias is not None,
        M=16,
        N=32,
    )
    return out
