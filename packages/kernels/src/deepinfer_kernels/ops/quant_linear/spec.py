"""What `quant_linear` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.draw import coin, matrix, normal, one_of, seeded, size
from deepinfer_kernels.formats.stored import (
    PACKED,
    STORED,
    pack_weight,
    plain_form,
    store_weight,
    stored_row_bytes,
)
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.quant_linear.reference import quant_linear as reference_quant_linear
from deepinfer_kernels.registry import Tolerance

_FORMS = (*STORED, "bf16", *(name + PACKED for name in STORED))


def quant_linear(
    x: Tensor, weight: Tensor, stored: str, bias: Tensor | None = None, exact: bool = False
) -> Tensor:
    """``x weight^T + bias`` with a weight that stays as it is stored.

    x: [n, K]; weight: uint8 [M, bytes of a row], see `deepinfer_kernels.formats.stored`: q8_0,
    q4_0, q4_1 (K a multiple of 32) or bf16, whose rows may lie apart; or q8_0x16, q4_0x16, q4_1x16
    of `formats.pack_weight`, several times as fast here. bias: [M] or None.
    Activations are rounded to int8 per 32 channels before the product, as GGUF's own kernels do,
    unless ``exact``; bf16 weights and float64 activations are always exact. Sums are float32 (or
    float64). Returns [n, M] like x.
    """
    op = "quant_linear"
    floating(op, x=x)
    shape(op, "x", x, (None, None))
    require(weight.dtype is torch.uint8, op, f"weight is uint8, got {weight.dtype}")
    shape(op, "weight", weight, (None, stored_row_bytes(stored, x.shape[1])))
    if stored.endswith(PACKED):
        whole = weight.is_contiguous() and weight.shape[0] % 16 == 0
        require(whole, op, f"{stored} rows lie together in groups of 16, got {list(weight.shape)}")
    if bias is not None:
        floating(op, bias=bias)
        shape(op, "bias", bias, (weight.shape[0],))
    return dispatch(op, x, weight, stored, bias, exact)


def _args(
    g: torch.Generator, n: int, rows: int, channels: int, stored: str, dtype: torch.dtype
) -> tuple[Any, ...]:
    packed = stored.endswith(PACKED)
    rows = -(-rows // 16) * 16 if packed else rows
    weight = store_weight(matrix(g, (rows, channels), torch.float32), plain_form(stored))
    if packed:
        weight = pack_weight(weight, plain_form(stored))
    return normal(g, (n, channels), dtype), weight, stored


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    rows, stored = size(g, 0, 13), _FORMS[size(g, 0, len(_FORMS) - 1)]
    x, weight, _ = _args(g, one_of(g, (0, 1, 3, 11)), rows, 32 * size(g, 1, 5), stored, dtype)
    if coin(g, 0.3):
        x[:, :32] = 0  # a block without any scale
    rows = weight.shape[0]
    if coin(g, 0.3) and not stored.endswith(PACKED):
        weight = torch.nn.functional.pad(weight, (0, 6))[:, : weight.shape[1]]
    bias = normal(g, (rows,), dtype) if coin(g) else None
    return x, weight, stored, bias, coin(g)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    return {
        f"{stored} {n}x{k} to {m}": _args(seeded(0), n, m, k, stored, dtype)
        for n, m, k in ((1, 576, 576), (1, 3072, 576), (32, 3072, 576), (256, 3072, 576))
        for stored in _FORMS
    }


def _cost(x: Tensor, weight: Tensor, stored: str, *rest: Any) -> tuple[int, int]:
    moved = weight.numel() + (x.numel() + x.shape[0] * weight.shape[0]) * x.itemsize
    return moved, 2 * x.numel() * weight.shape[0]


def _fake(x: Tensor, weight: Tensor, stored: str, *rest: Any, **named: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


SPEC = describe(
    quant_linear,
    reference=reference_quant_linear,
    fake=_fake,
    tags=frozenset({"memory", "compute"}),
    tolerance=Tolerance(float32=(1e-5, 1e-5), bfloat16=(1e-5, 2**-7), float64=(1e-13, 1e-13)),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
    twin=False,
)
