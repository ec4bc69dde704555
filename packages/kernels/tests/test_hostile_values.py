"""Arguments that are no tensors, and values that are not finite."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from deepinfer_kernels import ops
from deepinfer_kernels.errors import ShapeError


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "NoneType"), (np.ones(4, "float32"), "ndarray"), ([1.0], "list")]
)
def test_what_is_no_tensor_is_refused_by_name(value: Any, kind: str) -> None:
    with pytest.raises(ShapeError, match=f"rms_norm: x is a torch tensor, got {kind}"):
        ops.rms_norm(value, torch.ones(4), 1e-6)
    with pytest.raises(ShapeError, match=f"kv_load: slot is a torch tensor, got {kind}"):
        ops.kv_load(torch.zeros(1, 4096, dtype=torch.uint8), value, "fp8", 32, torch.float32)


def test_an_infinite_key_leaves_heads_that_are_not_there_out() -> None:
    q, key = torch.ones(1, 2, 1, 8), torch.full((1, 1, 8), inf)
    q[0, 1] = -1
    scores = ops.index_logits(q, key, torch.full((1, 2, 1), 2.0), torch.ones(1, 2).long())
    assert scores.flatten().tolist() == [inf, 0.0]


@pytest.mark.parametrize("gate", [-inf, -3e38, -1e30, -90.0, 90.0, 3e38, inf, nan])
def test_gates_far_from_zero_are_those_of_torch(gate: float) -> None:
    x, up = torch.full((33,), gate), torch.full((33,), 0.5)
    wanted = silu(x) * up
    limited = silu(x.clamp(max=7.0)) * up
    for got, right in (
        (ops.silu_mul(torch.cat([x, up])), wanted),
        (ops.swiglu(x, up, 7.0), limited),
    ):
        torch.testing.assert_close(got, right, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_pooling_of_gates_that_are_not_finite_is_that_of_their_softmax(rows: int) -> None:
    kinds = torch.tensor([0.0, -200.0, 1e30, -1e30, inf, -inf, nan])
    gates = torch.cartesian_prod(*[kinds] * rows).view(-1, rows).t().contiguous()
    value = torch.arange(gates.numel()).view_as(gates).float()
    wanted = (torch.softmax(gates, dim=0) * value).sum(dim=0)
    torch.testing.assert_close(
        ops.compress_pool(value[None], gates[None])[0], wanted, equal_nan=True
    )
