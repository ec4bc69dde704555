"""What `grouped_mx_linear` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import integer, require, shape
from deepinfer_kernels.draw import coin, normal, one_of, seeded, size
from deepinfer_kernels.formats.codes import encode_e2m1, encode_e4m3
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.grouped_mx_linear.reference import BLOCK
from deepinfer_kernels.ops.grouped_mx_linear.reference import (
    grouped_mx_linear as reference_grouped_mx_linear,
)
from deepinfer_kernels.registry import Tolerance


def grouped_mx_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    """Rows sorted by expert, each times its expert's matrix; both block-scaled (MXFP8, MXFP4).

    x: uint8 [M, K] E4M3 codes; x_scale: uint8 [M, K / 32] UE8M0, one a 32 channels; weight: uint8
    [E, N, K / 2] E2M1 codes, the even channel in the low nibble; weight_scale: uint8
    [E, N, K / 32]; first: int64 [E + 1] ascending, the rows of expert e being first[e] ..
    first[e + 1] - 1. It is read on the device: rows before and after those of all experts, the
    padding of a captured graph, give 0. K is a multiple of 32.
    Returns [M, N], summed in float32; ``wide`` leaves them so, else they are bfloat16.
    """
    op = "grouped_mx_linear"
    bytes_ = {"x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale}
    for name, tensor in bytes_.items():
        require(tensor.dtype is torch.uint8, op, f"{name} is uint8, got {tensor.dtype}")
    integer(op, first=first)
    shape(op, "x", x, (None, None))
    m, k = x.shape
    require(k > 0 and k % BLOCK == 0, op, f"channels of x are a multiple of {BLOCK}, got {k}")
    shape(op, "x_scale", x_scale, (m, k // BLOCK))
    shape(op, "weight", weight, (None, None, k // 2))
    shape(op, "weight_scale", weight_scale, (*weight.shape[:2], k // BLOCK))
    shape(op, "first", first, (weight.shape[0] + 1,))
    return dispatch(op, x, x_scale, weight, weight_scale, first, wide)


def _args(
    g: torch.Generator, counts: list[int], padding: int, n: int, k: int, wide: bool
) -> tuple[Any, ...]:
    ends = torch.tensor([0, *counts]).cumsum(0)
    m, experts = int(ends[-1]) + padding, len(counts)

    def scales(*sizes: int) -> Tensor:
        return torch.randint(125, 129, sizes, generator=g).to(torch.uint8)

    nibbles = encode_e2m1(normal(g, (experts, n, k), torch.float32, 2))
    return (
        encode_e4m3(normal(g, (m, k), torch.float32)),
        scales(m, k // BLOCK),
        nibbles[..., ::2] | (nibbles[..., 1::2] << 4),
        scales(experts, n, k // BLOCK),
        ends,
        wide,
    )


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    counts = [one_of(g, (0, 1, 3, 17, 70)) for _ in range(size(g, 1, 4))]
    padding = size(g, 1, 5) if coin(g) else 0
    n, k = one_of(g, (1, 8, 33, 130)), 32 * size(g, 1, 5)
    return _args(g, counts, padding, n, k, dtype is not torch.bfloat16)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    wide = dtype is not torch.bfloat16
    return {
        f"{experts}x{rows}x{n}x{k}": _args(seeded(0), [rows] * experts, 0, n, k, wide)
        for experts, rows, n, k in ((4, 2, 64, 192), (4, 128, 1024, 1024))
    }


def _cost(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> tuple[int, int]:
    touched = int((first.diff() > 0).sum())
    matrices = (weight.numel() + weight_scale.numel()) // max(weight.shape[0], 1)
    out = x.shape[0] * weight.shape[1] * (4 if wide else 2)
    moved = x.numel() + x_scale.numel() + touched * matrices + out
    return moved, 2 * x.numel() * weight.shape[1]


def _fake(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    dtype = torch.float32 if wide else torch.bfloat16
    return x.new_empty((x.shape[0], weight.shape[1]), dtype=dtype)


SPEC = describe(
    grouped_mx_linear,
    reference=reference_grouped_mx_linear,
    fake=_fake,
    tags=frozenset({"compute", "memory"}),
    # Every product is exact; the order of up to 160 terms of size 10 is not that of the reference.
    tolerance=Tolerance(float32=(5e-4, 1e-5), bfloat16=(5e-4, 2**-7), float64=(5e-4, 1e-5)),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
    twin=False,
)
