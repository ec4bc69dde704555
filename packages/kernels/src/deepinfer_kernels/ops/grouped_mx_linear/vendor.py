"""`grouped_mx_linear` by DeepGEMM, whose rows of an expert begin at a multiple of its tile."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.formats.codes import ue8m0_values
from deepinfer_kernels.ops._vendor import next_best
from deepinfer_kernels.vendors import load

LIBRARY = "deep_gemm"


def grouped_mx_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, first: Tensor, wide: bool
) -> Tensor:
    m, k = x.shape
    experts, n = weight.shape[:2]
    if wide or m == 0 or n == 0 or k % 128:
        why = "gives bfloat16 of rows whose channels are a multiple of 128"
        return next_best("grouped_mx_linear", why, x, x_scale, weight, weight_scale, first, wide)
    library = load(LIBRARY)
    tile = int(library.get_mk_alignment_for_contiguous_layout())
    # Sizes depend on shapes alone: every expert may end in a tile of which one row is filled.
    room = (-(-m // tile) + experts) * tile
    first = first.clamp(0, m)
    counts = first.diff().clamp(min=0)
    starts = ((counts + tile - 1) // tile * tile).cumsum(0) - (counts + tile - 1) // tile * tile
    row = torch.arange(m, device=x.device)
    expert = torch.searchsorted(first[1:].contiguous(), row, right=True)
    mine = (row >= first[0]) & (expert < experts)
    at = expert.clamp(max=experts - 1)
    # Rows of no expert go to the last, which is nobody's.
    place = torch.where(mine, starts[at] + row - first[at], room)
    layout = torch.full((room + 1,), -1, dtype=torch.int32, device=x.device)
    layout[place] = at.to(torch.int32)
    rows = x.new_zeros((room + 1, k))
    rows[place] = x
    scales = torch.ones((room + 1, k // 32), dtype=torch.float32, device=x.device)
    values = ue8m0_values(x.device)
    scales[place] = values[x_scale.int()]
    out = torch.empty((room, n), dtype=torch.bfloat16, device=x.device)
    library.m_grouped_fp8_fp4_gemm_nt_contiguous(
        (rows[:room].view(torch.float8_e4m3fn), scales[:room]),
        (weight.contiguous().view(torch.int8), values[weight_scale.int()]),
        out,
        layout[:room],
        recipe_a=(1, 32),
        recipe_b=(1, 32),
    )
    return torch.where(mine[:, None], out[place.clamp(max=room - 1)], 0.0)
