"""The wider operators, as compositions of the narrow ones.

Each stands for a piece of a transformer layer whose parts are always called together. One class
serves every back end: given the reference parts it is the oracle, given the fastest ones it is what
runs where there are too many rows for a fused form, and the products go to torch's linear (oneDNN,
which knows the matrix units of the machine).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Composed"]


@dataclass(frozen=True, slots=True)
class Composed:
    """The parts, under the names and with the arguments they have in `deepinfer_kernels.ops`."""

    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, bool], Tensor]
    fake_quant: Callable[[Tensor, str], Tensor]
    swiglu: Callable[[Tensor, Tensor, float], Tensor]
    pre: Callable[..., tuple[Tensor, Tensor, Tensor]]
    collapse: Callable[[Tensor, Tensor], Tensor]
    gate: Callable[..., tuple[Tensor, Tensor]]
    experts: Callable[..., Tensor]

    def mhc_pre_norm(
        self,
        S: Tensor,
        pending: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        eps: float,
        hc_eps: float,
        iters: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pre, post, comb = self.pre(S, fn, base, scale, eps, hc_eps, iters)
        return self.rms_norm(self.collapse(S, pending), norm, eps), pre, post, comb

    def norm_rope_quant(
        self, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
    ) -> Tensor:
        return self.fake_quant(self.rope(self.rms_norm(x, weight, eps), cos, sin, False), record)

    def mla_query_key(
        self,
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
        latent = self.rms_norm(linear(x, wq_a), q_norm, eps)
        q = linear(latent, wq_b).view(x.shape[0], wq_b.shape[0] // wkv.shape[0], wkv.shape[0])
        key = self.norm_rope_quant(linear(x, wkv), kv_norm, eps, cos, sin, record)
        return latent, self.rope(q, cos, sin, False), key

    def mla_output(
        self, out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor
    ) -> Tensor:
        n, (groups, rank, part) = out.shape[0], wo_a.shape
        grouped = self.rope(out, cos, sin, True).view(n, groups, part).transpose(0, 1)
        latent = torch.bmm(grouped, wo_a.transpose(1, 2)).transpose(0, 1)
        return linear(latent.reshape(n, groups * rank), wo_b)

    def moe_layer(
        self,
        x: Tensor,
        gate: Tensor,
        bias: Tensor,
        topk: int,
        scaling: float,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        shared_w1: Tensor,
        shared_w3: Tensor,
        shared_w2: Tensor,
        limit: float,
    ) -> Tensor:
        idx, w = self.gate(x, gate, bias, topk, scaling)
        hidden = self.swiglu(linear(x, shared_w1), linear(x, shared_w3), limit)
        return self.experts(x, idx, w, w1, w3, w2, limit) + linear(hidden, shared_w2)
