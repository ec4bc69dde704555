"""Routed experts of many rows: blocks of every size, rows not numbers, threads, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.native import library
from deepinfer_kernels.registry import default_registry

Args = tuple[Any, ...]

COUNTS = [
    [1, 17, 0, 1230],
    [33, 48, 1200, 81],
    [64, 80, 1100, 96],
    [0, 1400, 2, 16],
]
"""Rows of each expert: none, one, full and broken vectors, full and broken blocks of them."""


def _args(counts: list[int], width: int, inner: int) -> Args:
    """So many rows for each expert, in no order, in bfloat16."""
    g = seeded(width)
    wanted = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)])
    idx = wanted[torch.randperm(wanted.numel(), generator=g)].view(-1, 2)
    w1, w3 = torch.randn(2, len(counts), inner, width, generator=g).bfloat16() * width**-0.5
    w2 = torch.randn(len(counts), width, inner, generator=g).bfloat16() * inner**-0.5
    x, w = torch.randn(len(idx), width, generator=g).bfloat16(), torch.rand(idx.shape, generator=g)
    return x, idx, w, w1, w3, w2, 1.5


@pytest.mark.parametrize(("width", "inner"), [(130, 66), (256, 64), (98, 102), (99, 101)])
@pytest.mark.parametrize("counts", COUNTS)
def test_many_rows_are_those_of_the_reference(counts: list[int], width: int, inner: int) -> None:
    args = _args(counts, width, inner)
    spec = default_registry.spec("moe_experts")
    atol, rtol = spec.tolerance.of(torch.bfloat16)
    torch.testing.assert_close(ops.moe_experts(*args), spec.reference(*args), atol=atol, rtol=rtol)


def test_rows_that_are_not_numbers_leave_the_others_alone() -> None:
    x, *others = _args([33, 48, 1200, 81], 130, 66)
    sound = ops.moe_experts(x, *others)
    x[5], x[100] = torch.nan, torch.inf
    broken = ops.moe_experts(x, *others)
    assert broken[[5, 100]].isnan().all()
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[[5, 100]] = False
    assert torch.equal(broken[kept], sound[kept])


@pytest.mark.skipif(library.unavailable() is not None, reason="the native forms are not built here")
def test_number_of_threads_changes_no_bit() -> None:
    args = _args([33, 48, 1200, 81], 130, 66)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(ops.moe_experts(*args))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_views_of_one_fused_weight_are_read_where_they_lie() -> None:
    x, idx, w, w1, w3, w2, limit = _args([33, 48, 1200, 81], 130, 66)
    both = torch.cat([w1, w3], dim=1)
    wide = torch.cat([w2, w2], dim=2)
    got = ops.moe_experts(x, idx, w, both[:, :66], both[:, 66:], wide[:, :, 66:], limit)
    assert torch.equal(got, ops.moe_experts(x, idx, w, w1, w3, w2, limit))
