# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`engram_gate`: one program a stream of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.ops.engram_gate.reference import engram_gate as reference_engram_gate
from deepinfer_kernels.triton_support.launch import launch, power_of_two, torch_form


@triton.jit
def engram_gate_kernel(
    S, key, value, q_weight, k_weight, blocked, out, width, eps,
    H: tl.constexpr, HAS_BLOCKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    at = (row * H + stream) * width + cols
    s = tl.load(S + at, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + at, mask=inside, other=0.0).to(tl.float32)
    q_w = tl.load(q_weight + stream * width + cols, mask=inside, other=0.0).to(tl.float32)
    k_w = tl.load(k_weight + stream * width + cols, mask=inside, other=0.0).to(tl.float32)
    norm_s = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / width + eps)
    norm_k = 1.0 / tl.sqrt(tl.sum(k * k, axis=0) / width + eps)
    g = norm_s * norm_k * tl.sum(s * q_w * k_w * k, axis=0) / tl.sqrt(width * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(g), 1e-6))
    signed = tl.where(g > 0.0, root, tl.where(g < 0.0, -root, 0.0))
    gate = 1.0 / (1.0 + tl.exp(-signed))
    if HAS_BLOCKED:
        gate = tl.where(tl.load(blocked + row) != 0, 0.0, gate)
    v = tl.load(value + row * width + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (s + gate * v).to(out.dtype.element_ty), mask=inside)


def engram_gate(
    S: Tensor,
    key: Tensor,
    value: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    blocked: Tensor | None,
) -> Tensor:
    if torch_form(S, key, value, q_weight, k_weight):
        return reference_engram_gate(S, key, value, q_weight, k_weight, eps, blocked)
    n, h, width = S.shape
    S = S.contiguous()
    out = torch.empty_like(S)
    launch(
        engram_gate_kernel,
        (n, h),
        S,
        key.contiguous(),
        value.contiguous(),
        q_weight.contiguous(),
        k_weight.contiguous(),
        S if blocked is None else blocked.contiguous().view(torch.uint8),
        out,
        width,
        eps,
        H=h,
        HAS_BLOCKED=blocked is not None,
        BLOCK=power_of_two(width),
    )
    return out
