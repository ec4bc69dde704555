"""The layers of a V4.1 draft module in plain torch, under the names of its checkpoints.

Shapes: R requests, b block rows, h residual streams, H hidden, D head, n context keys. The residual
streams are mixed by hyper-connections (Xie et al. 2025, mHC): what a sub-layer reads is collapsed
with the mix that the sub-layer before it computed. One key is shared by all heads and is its own
value; a sink logit a head adds to the denominator only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.torch_extra import Tensor, functional, nn, torch, wide

CacheQuant = Literal["reference", "none"]


@dataclass(frozen=True, slots=True)
class V41Config:
    """The `text_config` keys that a draft module needs, under their names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    sliding_window: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    rope_theta: float = 10_000.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> V41Config:
        """From a whole config.json or its `text_config`; names what is missing or unsupported."""
        text: Mapping[str, Any] = raw.get("text_config", raw)
        for key, wanted in (("hc_shifted", True), ("dspark_target_attn_input", True)):
            if text.get(key, wanted) is not wanted:
                raise CheckpointError(f"draft config wants {key} = {wanted}, got {text[key]!r}")
        known = {k: text[k] for k in cls.__dataclass_fields__ if k in text}
        needed = {
            name for name, f in cls.__dataclass_fields__.items() if f.default is f.default_factory
        }
        missing = sorted(needed - known.keys())
        if missing:
            raise CheckpointError(f"draft config lacks {', '.join(missing)}")
        known["dspark_target_layer_ids"] = tuple(known["dspark_target_layer_ids"])
        config = cls(**known)
        if config.num_nextn_predict_layers < 1:
            raise CheckpointError("this checkpoint has no draft layers (num_nextn_predict_layers)")
        if config.num_attention_heads % config.o_groups or config.head_dim % 32:
            raise CheckpointError(
                "draft config wants o_groups to divide num_attention_heads and head_dim to be a "
                f"multiple of 32, got {config.o_groups}, {config.num_attention_heads} and "
                f"{config.head_dim}"
            )
        return config


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in the dtype of x."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * wide(weight)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, width: int, theta: float, sign: float = 1.0) -> Tensor:
    """Rotate the last `width` channels as adjacent pairs. x: [..., n, heads, d]; positions
    [..., n]; sign -1 turns back."""
    pair = torch.arange(width // 2, dtype=torch.float64)
    angle = positions.double()[..., None] * theta ** (-2.0 * pair / width)
    a, b = wide(x[..., -width:]).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = (t.to(a.dtype)[..., None, :] for t in (angle.cos(), sign * angle.sin()))
    turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    return torch.cat([x[..., :-width], turned.to(x.dtype)], dim=-1)


def round_key(x: Tensor) -> Tensor:
    """A sliding-window key as its cache returns it: E4M3 with a power-of-two scale for every 32
    channels, the smallest that keeps the largest magnitude within 448."""
    blocks = x.unflatten(-1, (-1, 32))
    peak = wide(blocks.abs().amax(-1, keepdim=True)).clamp_min(1e-4)
    mantissa, exponent = torch.frexp(peak / 448.0)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(peak), exponent)
    coded = (wide(blocks) / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (coded.to(scale.dtype) * scale).to(x.dtype).flatten(-2)


class Norm(nn.Module):
    """A weight for `rms_norm`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A matrix [outputs, inputs] without bias."""
    return nn.Linear(inputs, outputs, bias=False)


class V41Attention(nn.Module):
    """Low-rank queries, one shared key, sinks, grouped low-rank output."""

    def __init__(self, c: V41Config) -> None:
        super().__init__()
        self.c = c
        heads = c.num_attention_heads * c.head_dim
        self.wq_a = linear(c.hidden_size, c.q_lora_rank)
        self.q_norm = Norm(c.q_lora_rank)
        self.wq_b = linear(c.q_lora_rank, heads)
        self.wkv = linear(c.hidden_size, c.head_dim)
        self.kv_norm = Norm(c.head_dim)
        self.wo_a = linear(heads // c.o_groups, c.o_groups * c.o_lora_rank)
        self.wo_b = linear(c.o_groups * c.o_lora_rank, c.hidden_size)
        self.attn_sink = nn.Parameter(torch.zeros(c.num_attention_heads))

    def turn(self, x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
        """Rotary embedding of [..., n, heads, D] at positions [..., n]."""
        return rotate(x, positions, self.c.qk_rope_head_dim, self.c.rope_theta, sign)

    def keys(self, x: Tensor, positions: Tensor, cache_quant: CacheQuant) -> Tensor:
        """Keys [..., n, D] of inputs [..., n, H]."""
        key = rms_norm(self.wkv(x), self.kv_norm.weight, self.c.rms_norm_eps)
        key = self.turn(key[..., None, :], positions)[..., 0, :]
        return round_key(key) if cache_quant == "reference" else key

    def forward(
        self, x: Tensor, at: Tensor, context: Tensor, visible: Tensor, cache_quant: CacheQuant
    ) -> Tensor:
        """x: [R, b, H]; at: positions [R, b]; context: [R, n, D]; visible: bool [R, n]."""
        c = self.c
        latent = rms_norm(self.wq_a(x), self.q_norm.weight, c.rms_norm_eps)
        q = self.turn(self.wq_b(latent).unflatten(-1, (c.num_attention_heads, c.head_dim)), at)
        keys = wide(torch.cat([context, self.keys(x, at, cache_quant)], dim=1))
        seen = functional.pad(visible, (0, x.shape[1]), value=True)[:, None, None, :]
        logits = torch.einsum("rbhd,rkd->rbhk", wide(q), keys) * c.head_dim**-0.5
        logits = logits.masked_fill(~seen, -torch.inf)
        sink = wide(self.attn_sink)[:, None].expand(*logits.shape[:3], 1)
        weight = torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        out = torch.einsum("rbhk,rkd->rbhd", weight, keys).to(x.dtype)
        grouped = self.turn(out, at, -1.0).flatten(-2).unflatten(-1, (c.o_groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (c.o_groups, -1))
        return self.wo_b(torch.einsum("rbgi,goi->rbgo", grouped, wo_a).flatten(-2))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit)."""
    return functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)


class Gate(nn.Module):
    """Router weight [E, H] and selection bias [E]."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, hidden))
        self.bias = nn.Parameter(torch.zeros(experts))


class Experts(nn.Module):
    """Routed experts stacked: w1, w3 [E, I, H], w2 [E, H, I]."""

    def __init__(self, experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(experts, inner, hidden))
        self.w3 = nn.Parameter(torch.zeros(experts, inner, hidden))
        self.w2 = nn.Parameter(torch.zeros(experts, hidden, inner))


class SharedExpert(nn.Module):
    """The expert every token goes through."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3 = linear(hidden, inner), linear(hidden, inner)
        self.w2 = linear(inner, hidden)


class V41MoE(nn.Module):
    """Top-k of sqrt(softplus(score)) + bias, weights without the bias, plus a shared expert."""

    def __init__(self, c: V41Config) -> None:
        super().__init__()
        self.c = c
        inner = c.moe_intermediate_size
        self.gate = Gate(c.dspark_n_routed_experts, c.hidden_size)
        self.experts = Experts(c.dspark_n_routed_experts, c.hidden_size, inner)
        self.shared_experts = SharedExpert(c.hidden_size, c.n_shared_experts * inner)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts int64 [n, k] (lower index first among equals) and their weights [n, k]."""
        score = functional.linear(wide(x), wide(self.gate.weight))
        score = functional.softplus(score, threshold=20.0).sqrt()
        biased = score + wide(self.gate.bias)
        ranked = torch.sort(biased, dim=-1, descending=True, stable=True).indices
        picked = ranked[:, : self.c.dspark_num_experts_per_tok]
        weight = score.gather(1, picked)
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-20)
        return picked, weight * self.c.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """x: [R, b, H]."""
        flat, limit = x.flatten(0, -2), self.c.swiglu_limit
        picked, weight = self.route(flat)
        out = wide(torch.zeros_like(flat))
        for e in picked.unique().tolist():
            row, slot = (picked == e).nonzero(as_tuple=True)
            rows = flat[row]
            w1, w3, w2 = self.experts.w1[e], self.experts.w3[e], self.experts.w2[e]
            hidden = swiglu(functional.linear(rows, w1), functional.linear(rows, w3), limit)
            part = wide(functional.linear(hidden, w2)) * weight[row, slot, None]
            out.index_add_(0, row, part)
        shared = self.shared_experts
        kept = shared.w2(swiglu(shared.w1(flat), shared.w3(flat), limit))
        return (out.to(x.dtype) + kept).view_as(x)


class V41Layer(nn.Module):
    """Attention and experts, each between a collapse and an expansion of the streams.

    first: also holds the projection of the target's features; last: also the norm before the head.
    """

    def __init__(self, c: V41Config, *, first: bool, last: bool) -> None:
        super().__init__()
        self.c = c
        features = len(c.dspark_target_layer_ids) * c.hidden_size
        self.main_proj = linear(features, c.hidden_size) if first else None
        self.main_norm = Norm(c.hidden_size) if first else None
        self.norm = Norm(c.hidden_size) if last else None
        self.attn_norm, self.ffn_norm = Norm(c.hidden_size), Norm(c.hidden_size)
        self.attn, self.ffn = V41Attention(c), V41MoE(c)
        mixes = c.hc_mult * (c.hc_mult + 2)
        for part in ("attn", "ffn"):
            self.register_parameter(
                f"hc_{part}_fn", nn.Parameter(torch.zeros(mixes, c.hc_mult * c.hidden_size))
            )
            self.register_parameter(f"hc_{part}_base", nn.Parameter(torch.zeros(mixes)))
            self.register_parameter(f"hc_{part}_scale", nn.Parameter(torch.zeros(3)))

    def mix(self, streams: Tensor, part: str) -> tuple[Tensor, Tensor, Tensor]:
        """(pre [..., h], post [..., h], comb [..., h in, h out]) of one sub-layer."""
        c, h = self.c, self.c.hc_mult
        fn, base, scale = (wide(self.get_parameter(f"hc_{part}_{x}")) for x in _MIX)
        flat = wide(streams.flatten(-2))
        m = functional.linear(flat, fn)
        m = m * torch.rsqrt(flat.square().mean(-1, keepdim=True) + c.rms_norm_eps)
        pre = torch.sigmoid(m[..., :h] * scale[0] + base[:h]) + c.hc_eps
        post = 2.0 * torch.sigmoid(m[..., h : 2 * h] * scale[1] + base[h : 2 * h])
        comb = (m[..., 2 * h :] * scale[2] + base[2 * h :]).unflatten(-1, (h, h)).softmax(-1)
        comb = comb + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return pre, post, comb

    def forward(
        self,
        streams: Tensor,
        pending: Tensor,
        at: Tensor,
        context: Tensor,
        visible: Tensor,
        cache_quant: CacheQuant,
    ) -> tuple[Tensor, Tensor]:
        """streams: [R, b, h, H]; pending: the mix [R, b, h] that this layer applies first."""
        eps = self.c.rms_norm_eps
        pre, post, comb = self.mix(streams, "attn")
        x = rms_norm(collapse(streams, pending), self.attn_norm.weight, eps)
        streams = expand(self.attn(x, at, context, visible, cache_quant), streams, post, comb)
        pending, post, comb = self.mix(streams, "ffn")
        x = rms_norm(collapse(streams, pre), self.ffn_norm.weight, eps)
        return expand(self.ffn(x), streams, post, comb), pending


_MIX = ("fn", "base", "scale")


def collapse(streams: Tensor, mix: Tensor) -> Tensor:
    """[..., h, H] and [..., h] to [..., H]."""
    return (mix[..., None] * wide(streams)).sum(-2).to(streams.dtype)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """What a sub-layer gave, back into the streams: post_k y + sum_j comb[j, k] S_j."""
    kept = torch.einsum("...jk,...jc->...kc", comb, wide(streams))
    return (post[..., None] * wide(y)[..., None, :] + kept).to(streams.dtype)
