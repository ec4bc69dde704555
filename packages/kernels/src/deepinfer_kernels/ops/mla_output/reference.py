"""`mla_output` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_kernels.ops._parts import REFERENCE, Parts


def composed(
    parts: Parts, out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor
) -> Tensor:
    n, (groups, rank, part) = out.shape[0], wo_a.shape
    grouped = parts.rope(out, cos, sin, True).view(n, groups, part).transpose(0, 1)
    latent = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
    return linear(latent.reshape(n, groups * rank), wo_b)


mla_output = partial(composed, REFERENCE)
