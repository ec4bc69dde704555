"""`mla_query_key` as a composition of its parts: one text for every back end."""

from __future__ import annotations

from functools import partial

from torch import Tensor
from torch.nn.functional import linear

from deepinfer_kernels.ops._parts import REFERENCE, Parts
from deepinfer_kernels.ops.norm_rope_quant.reference import composed as compose_row


def composed(
    parts: Parts,
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    record: str,
) -> tuple[Tensor, Tensor, Tensor]:
    latent = parts.rms_norm(linear(x, wq_a), q_norm, eps)
    q = linear(latent, wq_b).view(x.shape[0], wq_b.shape[0] // wkv.shape[0], wkv.shape[0])
    key = compose_row(parts, linear(x, wkv), kv_norm, eps, cos, sin, record)
    return latent, parts.rope(q, cos, sin, False), key


mla_query_key = partial(composed, REFERENCE)
