"""A dense twin of the V4.1 decoder: whole sequences, masks instead of caches.

It is what the demo checkpoint is trained with, and an oracle for the cached runtime: nothing in
it is paged, ringed, chunked or resumed, so it can be read next to the description of the model.
Every tensor has the dtype of the parameters: call ``Twin.double()`` for float64.

Shapes: ``B`` rows, ``T`` tokens, ``h`` residual streams, ``H`` hidden size, ``D`` head size,
``R`` rotated channels, ``J`` compressed entries, ``r`` compress ratio, ``W`` sliding window.

The few operations that dominate the run time are reached through ``Ops`` so that the trainer can
put faster ones in their place; the defaults are the literal ones and the trainer's are tested
against them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


# ------------------------------------------------------------------ configuration
@dataclass(frozen=True)
class TwinConfig:
    """The `text_config` keys the twin uses, under their names in `config.json`."""

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
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: dict[str, Any] | None
    sliding_window: int
    compress_ratios: list[int]
    kv_source_layer_ids: list[int]
    index_source_layer_ids: list[int]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: list[int]
    engram_num_embeddings: list[int]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: list[int]
    dspark_markov_rank: int
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> TwinConfig:
        """Read a whole `config.json` (root with `text_config`) or its text part alone."""
        text = config.get("text_config", config)
        return cls(**{name: text[name] for name in cls.__dataclass_fields__})

    def source(self, sources: list[int], layer: int) -> int:
        """The largest source id not above `layer`."""
        return max(s for s in sources if s <= layer)


# ------------------------------------------------------------------ cache quantisers
def round_e4m3(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; |x| <= 6."""
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign((a / step).round() * step, x)


def ceil_power_of_two(v: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(v)
    exponent = torch.where(mantissa > 0.5, exponent, exponent - 1)
    return torch.ldexp(torch.ones_like(v), exponent)


def fq8(x: Tensor) -> Tensor:
    """E4M3 with a power-of-two scale per 32 channels (sliding-window keys)."""
    b = x.unflatten(-1, (-1, 32))
    a = b.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    s = ceil_power_of_two(a / 448)
    return (round_e4m3((b / s).clamp(-448, 448)) * s).flatten(-2)


def fqx(x: Tensor) -> Tensor:
    """E2M1 with a power-of-two scale per 32 channels (index queries and keys)."""
    b = x.unflatten(-1, (-1, 32))
    a = b.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126)
    s = ceil_power_of_two(a / 6)
    return (round_e2m1((b / s).clamp(-6, 6)) * s).flatten(-2)


def fq4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16 channels (compressed entries)."""
    b = x.unflatten(-1, (-1, 16))
    a = b.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-9)
    s = round_e4m3((a / 6).clamp_max(448))
    return (round_e2m1((b / s).clamp(-6, 6)) * s).flatten(-2)


def quantised(x: Tensor, quantiser: Callable[[Tensor], Tensor], cache_quant: str) -> Tensor:
    """`x` as the cache returns it; the gradient passes straight through."""
    if cache_quant == "none":
        return x
    if cache_quant != "reference":
        raise ValueError(f"cache_quant must be 'reference' or 'none', got {cache_quant!r}")
    with torch.no_grad():
        delta = quantiser(x) - x
    return x + delta


# ------------------------------------------------------------------ small pieces
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest, the lower index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def rope_frequencies(cfg: TwinConfig, compressed: bool) -> Tensor:
    """Angles per position, float64 `[R/2]`; YaRN only where entries are compressed."""
    R = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    i = torch.arange(R // 2, dtype=torch.float64)
    f = theta ** (-2 * i / R)
    y = cfg.rope_scaling
    if not compressed or y is None:
        return f

    def dim(turns: float) -> float:
        length = y["original_max_position_embeddings"]
        return R * math.log(length / (2 * math.pi * turns)) / (2 * math.log(theta))

    lo = max(math.floor(dim(y["beta_fast"])), 0)
    hi = min(math.ceil(dim(y["beta_slow"])), R - 1)
    g = ((i - lo) / (hi - lo if hi != lo else 0.001)).clamp(0, 1)
    return f / y["factor"] * g + f * (1 - g)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last R channels as adjacent pairs; cos and sin `[..., R/2]` broadcast to x."""
    R = 2 * cos.shape[-1]
    a, b = x[..., -R:].unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-R], turned), -1)


# ------------------------------------------------------------------ hyper-connections
def hc_weights(
    m: Tensor, base: Tensor, scale: Tensor, h: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split normalised mixes `[..., h(h+2)]` into pre `[..., h]`, post `[..., h]`, comb
    `[..., h, h]` (first axis in, second axis out), the last made doubly stochastic."""
    pre = torch.sigmoid(m[..., :h] * scale[0] + base[:h]) + eps
    post = 2 * torch.sigmoid(m[..., h : 2 * h] * scale[1] + base[h : 2 * h])
    A = (m[..., 2 * h :] * scale[2] + base[2 * h :]).unflatten(-1, (h, h))
    A = A.softmax(-1) + eps
    A = A / (A.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        A = A / (A.sum(-1, keepdim=True) + eps)
        A = A / (A.sum(-2, keepdim=True) + eps)
    return pre, post, A


def hc_mix(
    S: Tensor, fn: Tensor, base: Tensor, scale: Tensor, cfg: TwinConfig
) -> tuple[Tensor, Tensor, Tensor]:
    f = S.flatten(-2)
    m = F.linear(f, fn) * torch.rsqrt(f.square().mean(-1, keepdim=True) + cfg.rms_norm_eps)
    return hc_weights(m, base, scale, cfg.hc_mult, cfg.hc_sinkhorn_iters, cfg.hc_eps)


def hc_collapse(S: Tensor, p: Tensor) -> Tensor:
    return (p.unsqueeze(-1) * S).sum(-2)


def hc_collapse_norm(S: Tensor, p: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(hc_collapse(S, p), weight, eps)


def hc_expand(y: Tensor, S: Tensor, post: Tensor, A: Tensor) -> Tensor:
    return post.unsqueeze(-1) * y.unsqueeze(-2) + torch.einsum("...jk,...jc->...kc", A, S)


# ------------------------------------------------------------------ attention
def attend(
    q: Tensor, local: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, W: int
) -> Tensor:
    """One softmax over the window, the chosen compressed entries and a valueless sink.

    q `[B,T,heads,D]`; local `[B,T,D]` is key and value of position t; entries `[B,J,D]`;
    chosen bool `[B,T,J]`; sink `[heads]`. Returns `[B,T,heads,D]`.
    """
    T = q.shape[1]
    t = torch.arange(T, device=q.device)
    seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - W)
    mask = seen.expand(q.shape[0], T, T)
    keys = local
    if entries is not None and chosen is not None:
        keys = torch.cat((local, entries), 1)
        mask = torch.cat((mask, chosen), -1)
    return attend_block(q, keys, mask, sink)


def attend_block(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """q `[N,b,heads,D]`, keys `[N,K,D]`, mask `[N,b,K]`: one key head for all query heads."""
    logits = torch.einsum("nthd,nkd->nthk", q, keys) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
    drain = sink.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
    weights = torch.cat((logits, drain), -1).softmax(-1)[..., :-1]
    return torch.einsum("nthk,nkd->nthd", weights, keys)


def index_scores(qi: Tensor, wi: Tensor, K: Tensor) -> Tensor:
    """qi `[B,T,heads,Di]`, wi `[B,T,heads]`, K `[B,J,Di]` -> `[B,T,J]`."""
    return torch.einsum("bthj,bth->btj", torch.einsum("bthd,bjd->bthj", qi, K).relu(), wi)


# ------------------------------------------------------------------ experts
def swiglu(g: Tensor, u: Tensor, limit: float) -> Tensor:
    return F.silu(g.clamp_max(limit)) * u.clamp(-limit, limit)


def routed_experts(
    x: Tensor, picks: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    """Sum over picked experts. x `[N,H]`, picks int `[N,k]`, w `[N,k]`, w1/w3 `[E,I,H]`,
    w2 `[E,H,I]`. Rows are sorted by expert and padded to the fullest one."""
    N, k = picks.shape
    E = w1.shape[0]
    flat = picks.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=E)
    first = counts.cumsum(0) - counts
    owner = flat[order]
    slot = owner * counts.max() + torch.arange(N * k, device=x.device) - first[owner]
    cap = int(counts.max())
    rows = x.new_zeros(E * cap, x.shape[1]).index_copy(0, slot, x[order // k])
    rows = rows.view(E, cap, -1)
    mid = swiglu(rows @ w1.transpose(1, 2), rows @ w3.transpose(1, 2), limit)
    out = (mid @ w2.transpose(1, 2)).flatten(0, 1)
    back = torch.empty_like(slot)
    back[order] = slot
    return (out[back].view(N, k, -1) * w.unsqueeze(-1)).sum(1)


# ------------------------------------------------------------------ replaceable operations
@dataclass
class Ops:
    """The operations worth replacing by faster equals."""

    hc_mix: Callable[..., tuple[Tensor, Tensor, Tensor]] = hc_mix
    hc_collapse_norm: Callable[..., Tensor] = hc_collapse_norm
    hc_expand: Callable[..., Tensor] = hc_expand
    attend: Callable[..., Tensor] = attend
    index_scores: Callable[..., Tensor] = index_scores
    routed_experts: Callable[..., Tensor] = routed_experts
    topk: Callable[[Tensor, int], Tensor] = stable_topk
    rms_norm: Callable[..., Tensor] = rms_norm
    rotate: Callable[..., Tensor] = rotate
    quantised: Callable[..., Tensor] = quantised


# ------------------------------------------------------------------ modules
class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Compressor(nn.Module):
    def __init__(self, cfg: TwinConfig, ratio: int) -> None:
        super().__init__()
        self.wkv = linear(cfg.hidden_size, cfg.head_dim)
        if ratio > 1:
            self.wgate = linear(cfg.hidden_size, cfg.head_dim)
        self.norm = Norm(cfg.head_dim)
        self.ratio, self.eps = ratio, cfg.rms_norm_eps

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """`[B,T,H]` -> un-rotated latents `[B, T//r, D]`."""
        v = self.wkv(x)
        if self.ratio > 1:
            J = x.shape[1] // self.ratio
            v, g = (
                y[:, : J * self.ratio].unflatten(1, (J, self.ratio)) for y in (v, self.wgate(x))
            )
            v = (g.softmax(2) * v).sum(2)
        return ops.rms_norm(v, self.norm.weight, self.eps)


class Indexer(nn.Module):
    def __init__(self, cfg: TwinConfig, owns_keys: bool) -> None:
        super().__init__()
        self.wq_b = linear(cfg.q_lora_rank, cfg.index_n_heads * cfg.index_head_dim)
        self.weights_proj = linear(cfg.hidden_size, cfg.index_n_heads)
        if owns_keys:
            self.wk = linear(cfg.head_dim, cfg.index_head_dim)
            self.k_norm = Norm(cfg.index_head_dim)


@dataclass
class Angles:
    """cos and sin `[T, R/2]` of the positions of one sequence."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Angles:
        a = positions.unsqueeze(-1).to(torch.float64) * frequencies
        return cls(a.cos().to(dtype), a.sin().to(dtype))

    def every(self, stride: int, count: int) -> Angles:
        """The angles of compressed entries: the first token of each group."""
        return Angles(self.cos[::stride][:count], self.sin[::stride][:count])


@dataclass
class Probe:
    """What the index loss of one top-k source layer needs, for a few query rows."""

    scores: Tensor  # [B, rows, J], with gradient into the indexer alone
    mass: Tensor  # [B, rows, J], attention mass of the entries, all heads, no gradient
    allowed: Tensor  # bool [B, rows, J]


@dataclass
class Pass:
    """What one forward pass hands from layer to layer, and what it reports.

    `select=False` lets every query see every finished entry (the first phase of training).
    `probe_rows` asks for a `Probe` of each top-k source layer at these query positions.
    """

    cache_quant: str
    select: bool = True
    probe_rows: Tensor | None = None
    entries: dict[int, Tensor] = field(default_factory=dict)
    index_keys: dict[int, Tensor] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    candidates: Tensor | None = None
    probes: dict[int, Probe] = field(default_factory=dict)
    features: list[Tensor] = field(default_factory=list)
    loads: dict[str, Tensor] = field(default_factory=dict)


class Attention(nn.Module):
    def __init__(self, cfg: TwinConfig, layer: int) -> None:
        super().__init__()
        H, D, heads = cfg.hidden_size, cfg.head_dim, cfg.num_attention_heads
        self.cfg, self.layer, self.ratio = cfg, layer, cfg.compress_ratios[layer]
        self.wq_a, self.q_norm = linear(H, cfg.q_lora_rank), Norm(cfg.q_lora_rank)
        self.wq_b = linear(cfg.q_lora_rank, heads * D)
        self.wkv, self.kv_norm = linear(H, D), Norm(D)
        self.wo_a = linear(heads * D // cfg.o_groups, cfg.o_groups * cfg.o_lora_rank)
        self.wo_b = linear(cfg.o_groups * cfg.o_lora_rank, H)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        if layer in cfg.kv_source_layer_ids:
            self.compressor = Compressor(cfg, self.ratio)
        if layer in cfg.index_source_layer_ids:
            self.indexer = Indexer(cfg, layer in cfg.kv_source_layer_ids)

    def query(self, x: Tensor, angles: Angles, ops: Ops) -> tuple[Tensor, Tensor]:
        qr = ops.rms_norm(self.wq_a(x), self.q_norm.weight, self.cfg.rms_norm_eps)
        q = self.wq_b(qr).unflatten(-1, (self.cfg.num_attention_heads, -1))
        return qr, ops.rotate(q, angles.cos.unsqueeze(-2), angles.sin.unsqueeze(-2))

    def key(self, x: Tensor, angles: Angles, ops: Ops, cache_quant: str) -> Tensor:
        k = ops.rms_norm(self.wkv(x), self.kv_norm.weight, self.cfg.rms_norm_eps)
        return ops.quantised(ops.rotate(k, angles.cos, angles.sin), fq8, cache_quant)

    def output(self, o: Tensor, angles: Angles, ops: Ops) -> Tensor:
        cfg = self.cfg
        o = ops.rotate(o, angles.cos.unsqueeze(-2), -angles.sin.unsqueeze(-2))
        o = o.flatten(-2).unflatten(-1, (cfg.o_groups, -1))
        w = self.wo_a.weight.unflatten(0, (cfg.o_groups, -1))
        return self.wo_b(torch.einsum("...gi,goi->...go", o, w).flatten(-2))

    def forward(self, x: Tensor, angles: Angles, state: Pass, ops: Ops) -> Tensor:
        cfg, layer = self.cfg, self.layer
        qr, q = self.query(x, angles, ops)
        k = self.key(x, angles, ops, state.cache_quant)
        entries = chosen = None
        if self.ratio:
            if hasattr(self, "compressor"):
                self.compress(x, angles, state, ops)
            entries = state.entries[cfg.source(cfg.kv_source_layer_ids, layer)]
            if hasattr(self, "indexer"):
                self.choose(x, qr, angles, state, ops)
                if state.probe_rows is not None:
                    state.probes[layer] = self.probe(x, qr, q, k, angles, state, ops)
            chosen = state.chosen[cfg.source(cfg.index_source_layer_ids, layer)]
        o = ops.attend(q, k, entries, chosen, self.attn_sink, cfg.sliding_window)
        return self.output(o, angles, ops)

    def compress(self, x: Tensor, angles: Angles, state: Pass, ops: Ops) -> None:
        c = self.compressor(x, ops)
        at = angles.every(self.ratio, c.shape[1])
        state.entries[self.layer] = ops.quantised(
            ops.rotate(c, at.cos, at.sin), fq4, state.cache_quant
        )
        # the index learns from its own loss: nothing flows from it into the trunk
        ik = self.indexer.wk(c.detach())
        ik = ops.rms_norm(ik, self.indexer.k_norm.weight, self.cfg.rms_norm_eps)
        state.index_keys[self.layer] = ops.quantised(
            ops.rotate(ik, at.cos, at.sin), fqx, state.cache_quant
        )

    def scores(
        self, x: Tensor, qr: Tensor, angles: Angles, state: Pass, ops: Ops, rows: Tensor | slice
    ) -> Tensor:
        """Index scores `[B, rows, J]` of some query rows, unmasked."""
        cfg = self.cfg
        at = Angles(angles.cos[rows], angles.sin[rows])
        qi = self.indexer.wq_b(qr[:, rows].detach()).unflatten(-1, (cfg.index_n_heads, -1))
        qi = ops.rotate(qi, at.cos.unsqueeze(-2), at.sin.unsqueeze(-2))
        qi = ops.quantised(qi, fqx, state.cache_quant)
        wi = self.indexer.weights_proj(x[:, rows].detach())
        wi = wi * (cfg.index_n_heads * cfg.index_head_dim) ** -0.5  # positive: order unchanged
        keys = state.index_keys[cfg.source(cfg.kv_source_layer_ids, self.layer)]
        return ops.index_scores(qi, wi, keys)

    def visible(self, x: Tensor) -> Tensor:
        """Bool `[B, T, J]`: entry j is finished when query t runs."""
        B, T, r = x.shape[0], x.shape[1], self.ratio
        t = torch.arange(T, device=x.device)
        seen = torch.arange(T // r, device=x.device) < ((t + 1) // r).unsqueeze(-1)
        return seen.expand(B, T, T // r)

    def choose(self, x: Tensor, qr: Tensor, angles: Angles, state: Pass, ops: Ops) -> None:
        cfg, layer = self.cfg, self.layer
        visible = self.visible(x)
        # with no more entries than picks (hence fewer than candidates hold) all are picked
        if not state.select or visible.shape[-1] <= cfg.index_topk:
            state.chosen[layer] = visible
            return
        with torch.no_grad():
            scores = self.scores(x, qr, angles, state, ops, slice(None))
            allowed = visible
            if layer == cfg.candidate_source_layer_id:
                state.candidates = self.candidate_entries(scores, visible, ops)
            elif state.candidates is not None:
                allowed = visible & state.candidates
            best = ops.topk(scores.masked_fill(~allowed, -torch.inf), cfg.index_topk)
            state.chosen[layer] = torch.zeros_like(allowed).scatter(-1, best, True) & allowed

    def candidate_entries(self, scores: Tensor, visible: Tensor, ops: Ops) -> Tensor:
        """Bool `[B,T,J]`: entries of the best blocks; the newest visible block always is one."""
        size, J = self.cfg.candidate_block_size, scores.shape[-1]
        blocks = -(-J // size)
        pad = blocks * size - J
        shown = F.pad(visible, (0, pad)).unflatten(-1, (blocks, size))
        masked = F.pad(scores, (0, pad)).unflatten(-1, (blocks, size))
        best = masked.masked_fill(~shown, -torch.inf).amax(-1)
        exists = shown.any(-1)
        newest = exists & ~F.pad(exists[..., 1:], (0, 1))
        best = best.masked_fill(newest, torch.inf)
        kept = ops.topk(best, min(self.cfg.candidate_topk_blocks, blocks))
        mask = torch.zeros_like(exists).scatter(-1, kept, True) & exists
        return mask.repeat_interleave(size, -1)[..., :J]

    def probe(
        self,
        x: Tensor,
        qr: Tensor,
        q: Tensor,
        k: Tensor,
        angles: Angles,
        state: Pass,
        ops: Ops,
    ) -> Probe:
        cfg, rows = self.cfg, state.probe_rows
        assert rows is not None
        entries = state.entries[cfg.source(cfg.kv_source_layer_ids, self.layer)]
        allowed = self.visible(x)[:, rows]
        with torch.no_grad():
            t = torch.arange(x.shape[1], device=x.device)
            near = (t <= rows[:, None]) & (t > rows[:, None] - cfg.sliding_window)
            keys = torch.cat((k, entries), 1)
            mask = torch.cat((near.expand(x.shape[0], -1, -1), allowed), -1)
            logits = torch.einsum("bthd,bkd->bthk", q[:, rows], keys) * cfg.head_dim**-0.5
            logits = logits.masked_fill(~mask.unsqueeze(2), -torch.inf)
            drain = self.attn_sink.view(1, 1, -1, 1).expand(*logits.shape[:3], 1)
            mass = torch.cat((logits, drain), -1).softmax(-1)[..., k.shape[1] : -1].sum(2)
        return Probe(self.scores(x, qr, angles, state, ops, rows), mass, allowed)


class Gate(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("bias_vl", torch.zeros(experts))


class Experts(nn.Module):
    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, inner, width))
        self.w3 = nn.Parameter(torch.empty(experts, inner, width))
        self.w2 = nn.Parameter(torch.empty(experts, width, inner))


class SharedExpert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = linear(width, inner), linear(width, inner), linear(inner, width)


class MoE(nn.Module):
    def __init__(self, cfg: TwinConfig, experts: int, picks: int) -> None:
        super().__init__()
        self.cfg, self.picks = cfg, picks
        self.gate = Gate(cfg.hidden_size, experts)
        self.experts = Experts(experts, cfg.hidden_size, cfg.moe_intermediate_size)
        self.shared_experts = SharedExpert(
            cfg.hidden_size, cfg.n_shared_experts * cfg.moe_intermediate_size
        )

    def forward(self, x: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        """Output like x, and the number of picks of each expert `[E]`."""
        cfg, flat = self.cfg, x.flatten(0, -2)
        s = F.softplus(F.linear(flat, self.gate.weight)).sqrt()
        picks = ops.topk(s.detach() + self.gate.bias, self.picks)
        w = s.gather(-1, picks)
        w = w / w.sum(-1, keepdim=True).clamp_min(1e-20) * cfg.routed_scaling_factor
        e, sh = self.experts, self.shared_experts
        out = ops.routed_experts(flat, picks, w, e.w1, e.w3, e.w2, cfg.swiglu_limit)
        shared = sh.w2(swiglu(sh.w1(flat), sh.w3(flat), cfg.swiglu_limit))
        load = torch.bincount(picks.flatten(), minlength=s.shape[-1])
        return (out + shared).view_as(x), load


class Engram(nn.Module):
    """Hashed n-gram rows added to every residual stream."""

    def __init__(self, cfg: TwinConfig, layer: int, compressed_ids: Tensor) -> None:
        super().__init__()
        h, H = cfg.hc_mult, cfg.hidden_size
        columns = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads
        self.cfg = cfg
        primes = engram_primes(cfg)[layer]
        self.embed = nn.Embedding(sum(primes), cfg.engram_head_dim)
        self.wkv = linear(columns * cfg.engram_head_dim, (h + 1) * H)
        self.q_weight = nn.Parameter(torch.ones(h, H))
        self.k_weight = nn.Parameter(torch.ones(h, H))
        self.primes = torch.tensor(primes).view(-1, cfg.engram_n_heads)
        self.offsets = (torch.tensor(primes).cumsum(0) - torch.tensor(primes)).view_as(self.primes)
        self.multipliers = engram_multipliers(cfg, layer)
        self.compressed_ids = compressed_ids

    def rows(self, ids: Tensor) -> Tensor:
        """Table rows `[B, T, columns]` of each token and its predecessors."""
        N, pad = self.cfg.engram_max_ngram_size, self.compressed_ids[self.cfg.engram_pad_token_id]
        c = self.compressed_ids[ids]
        mixed = c * self.multipliers[0]
        columns: list[Tensor] = []
        for i in range(1, N):
            before = F.pad(c, (i, 0), value=int(pad))[:, : c.shape[1]]
            mixed = mixed ^ (before * self.multipliers[i])
            columns.append(mixed.unsqueeze(-1) % self.primes[i - 1] + self.offsets[i - 1])
        return torch.cat(columns, -1)

    def forward(self, S: Tensor, ids: Tensor) -> Tensor:
        cfg, eps = self.cfg, self.cfg.rms_norm_eps
        kv = self.wkv(self.embed(self.rows(ids)).flatten(-2)).unflatten(-1, (cfg.hc_mult + 1, -1))
        key, value = kv[..., : cfg.hc_mult, :], kv[..., cfg.hc_mult :, :]
        g = (S * self.q_weight * self.k_weight * key).sum(-1) * cfg.hidden_size**-0.5
        g = g * torch.rsqrt(S.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
        gate = torch.sigmoid(g.sign() * g.abs().clamp_min(1e-6).sqrt())
        return S + gate.unsqueeze(-1) * value


class Layer(nn.Module):
    def __init__(self, cfg: TwinConfig, index: int, compressed_ids: Tensor | None) -> None:
        """`index` runs over the trunk and then the draft layers."""
        super().__init__()
        h = cfg.hc_mult
        draft = index >= cfg.num_hidden_layers
        self.cfg, self.index = cfg, index
        self.attn_norm, self.ffn_norm = Norm(cfg.hidden_size), Norm(cfg.hidden_size)
        self.attn = Attention(cfg, index)
        self.ffn = MoE(
            cfg,
            cfg.dspark_n_routed_experts if draft else cfg.n_routed_experts,
            cfg.dspark_num_experts_per_tok if draft else cfg.num_experts_per_tok,
        )
        for kind in ("attn", "ffn"):
            for part, shape in (
                ("fn", (h * (h + 2), h * cfg.hidden_size)),
                ("base", (h * (h + 2),)),
                ("scale", (3,)),
            ):
                self.register_parameter(f"hc_{kind}_{part}", nn.Parameter(torch.empty(shape)))
        if index in cfg.engram_layer_ids:
            assert compressed_ids is not None
            self.engram = Engram(cfg, index, compressed_ids)

    def hc(self, S: Tensor, kind: str, ops: Ops) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (getattr(self, f"hc_{kind}_{p}") for p in ("fn", "base", "scale"))
        return ops.hc_mix(S, fn, base, scale, self.cfg)

    def run(
        self, S: Tensor, p: Tensor, attention: Callable[[Tensor], Tensor], ops: Ops
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both sub-layers; each applies the pre-mix that the one before it computed."""
        eps = self.cfg.rms_norm_eps
        p_a, post, A = self.hc(S, "attn", ops)
        y = attention(ops.hc_collapse_norm(S, p, self.attn_norm.weight, eps))
        S = ops.hc_expand(y, S, post, A)
        p_f, post, A = self.hc(S, "ffn", ops)
        y, load = self.ffn(ops.hc_collapse_norm(S, p_a, self.ffn_norm.weight, eps), ops)
        return ops.hc_expand(y, S, post, A), p_f, load


class MarkovHead(nn.Module):
    def __init__(self, cfg: TwinConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab_size, cfg.dspark_markov_rank)
        self.head = linear(cfg.dspark_markov_rank, cfg.vocab_size)


class ConfidenceHead(nn.Module):
    def __init__(self, cfg: TwinConfig) -> None:
        super().__init__()
        self.proj = linear(cfg.hidden_size + cfg.dspark_markov_rank, 1)


# ------------------------------------------------------------------ Engram constants
def is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def engram_primes(cfg: TwinConfig) -> dict[int, list[int]]:
    """Table sizes of each Engram layer, by n-gram size and then head; no prime is used twice."""
    used: set[int] = set()
    primes: dict[int, list[int]] = {}
    for layer in cfg.engram_layer_ids:
        primes[layer] = []
        for _ in range(2, cfg.engram_max_ngram_size + 1):
            n = cfg.engram_vocab_size - 1
            for _ in range(cfg.engram_n_heads):
                n += 1
                while n in used or not is_prime(n):
                    n += 1
                used.add(n)
                primes[layer].append(n)
    return primes


def engram_multipliers(cfg: TwinConfig, layer: int) -> Tensor:
    bound = max(1, ((2**63 - 1) // cfg.engram_compressed_vocab_size) // 2)
    draw = np.random.default_rng(10007 * layer).integers(
        0, bound, size=cfg.engram_max_ngram_size, dtype=np.int64
    )
    return torch.from_numpy(draw * 2 + 1)


def compress_vocabulary(tokenizer: Any) -> list[int]:
    """Compressed id of every token id of a `tokenizers.Tokenizer`: spellings that differ only
    in case, accents or the kind of white space share one."""
    from tokenizers import Regex, normalizers

    space = "\ue000"
    fold = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), space),
            normalizers.Strip(),
            normalizers.Replace(space, " "),
        ]
    )
    seen: dict[str, int] = {}
    out: list[int] = []
    for i in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([i], skip_special_tokens=False)
        broken = "\ufffd" in text
        key = tokenizer.id_to_token(i) if broken else fold.normalize_str(text) or text
        out.append(seen.setdefault(key, len(seen)))
    return out


# ------------------------------------------------------------------ the whole model
class Twin(nn.Module):
    """Trunk and draft module. `compressed_ids` is `compress_vocabulary` of the tokenizer."""

    def __init__(self, cfg: TwinConfig, compressed_ids: list[int], ops: Ops | None = None) -> None:
        super().__init__()
        distinct = max(compressed_ids) + 1
        if distinct != cfg.engram_compressed_vocab_size or len(compressed_ids) < cfg.vocab_size:
            raise ValueError(
                f"config has engram_compressed_vocab_size {cfg.engram_compressed_vocab_size} and "
                f"vocab_size {cfg.vocab_size}, the tokenizer {distinct} and {len(compressed_ids)}:"
                " take both from one export"
            )
        self.cfg, self.ops = cfg, ops or Ops()
        ids = torch.tensor(compressed_ids)
        L = cfg.num_hidden_layers
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg, i, ids) for i in range(L))
        self.norm = Norm(cfg.hidden_size)
        self.head = linear(cfg.hidden_size, cfg.vocab_size)
        self.mtp = nn.ModuleList(
            Layer(cfg, L + i, None) for i in range(cfg.num_nextn_predict_layers)
        )
        first, last = self.mtp[0], self.mtp[-1]
        first.main_proj = linear(
            len(cfg.dspark_target_layer_ids) * cfg.hidden_size, cfg.hidden_size
        )
        first.main_norm = Norm(cfg.hidden_size)
        last.norm = Norm(cfg.hidden_size)
        last.markov_head = MarkovHead(cfg)
        last.confidence_head = ConfidenceHead(cfg)
        self.frequencies = {c: rope_frequencies(cfg, c) for c in (False, True)}

    def angles(self, positions: Tensor, ratio: int) -> Angles:
        return Angles.of(positions, self.frequencies[ratio > 0], self.norm.weight.dtype)

    def streams(self, x: Tensor) -> tuple[Tensor, Tensor]:
        S = x.unsqueeze(-2).expand(*x.shape[:-1], self.cfg.hc_mult, x.shape[-1])
        p = x.new_zeros(*x.shape[:-1], self.cfg.hc_mult)
        p[..., 0] = 1
        return S, p

    def trunk(self, ids: Tensor, state: Pass) -> Tensor:
        """ids int `[B,T]` -> normed hidden `[B,T,H]`; `state` collects the by-products."""
        cfg, ops = self.cfg, self.ops
        positions = torch.arange(ids.shape[1], device=ids.device)
        at = {c: self.angles(positions, c) for c in (0, 1)}
        S, p = self.streams(self.embed(ids))
        for layer in self.layers:
            if hasattr(layer, "engram"):
                S = layer.engram(S, ids)
            if layer.index in cfg.dspark_target_layer_ids:
                state.features.append(S.mean(-2))
            angles = at[min(layer.attn.ratio, 1)]
            S, p, load = layer.run(S, p, lambda x, a=layer.attn, r=angles: a(x, r, state, ops), ops)
            state.loads[f"layers.{layer.index}"] = load
        return ops.hc_collapse_norm(S, p, self.norm.weight, cfg.rms_norm_eps)

    def forward(self, ids: Tensor, cache_quant: str = "reference") -> Tensor:
        """Logits `[B,T,V]` of the token after each position."""
        return self.head(self.trunk(ids, Pass(cache_quant)))

    def features(self, ids: Tensor, cache_quant: str = "reference") -> Tensor:
        """What the draft module reads of the trunk, `[B, T, targets * H]`."""
        state = Pass(cache_quant)
        self.trunk(ids, state)
        return torch.cat(state.features, -1)

    def draft_block(
        self,
        features: Tensor,
        ids: Tensor,
        at: Tensor,
        cache_quant: str = "reference",
        state: Pass | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One parallel draft pass for many anchors.

        features `[B,T,3H]`; ids `[B,T']` with T' > max(at) + 1; at int `[B,A]`: the last position
        P whose features are known, the anchor being ids[P+1]. Returns base logits `[B,A,b,V]`
        and the un-normed states `[B,A,b,H]` for the drafts of positions P+2 .. P+1+b.
        """
        cfg, ops, b = self.cfg, self.ops, self.cfg.dspark_block_size
        first, last = self.mtp[0], self.mtp[-1]
        B, A, W = *at.shape, cfg.sliding_window
        u = ops.rms_norm(first.main_proj(features), first.main_norm.weight, cfg.rms_norm_eps)
        context_angles = self.angles(torch.arange(features.shape[1], device=ids.device), 0)
        window = at.unsqueeze(-1) - torch.arange(W - 1, -1, -1, device=ids.device)
        mask = F.pad(window >= 0, (0, b), value=True)
        mask = mask.unsqueeze(2).expand(B, A, b, W + b).flatten(0, 1)
        row = torch.arange(B, device=ids.device)
        angles = self.angles(at.unsqueeze(-1) + 1 + torch.arange(b, device=ids.device), 0)
        block = ids.new_full((B, A, b), cfg.dspark_noise_token_id)
        block[..., 0] = ids.gather(1, at + 1)
        S, p = self.streams(self.embed(block))
        for layer in self.mtp:
            attn = layer.attn
            context = attn.key(u, context_angles, ops, cache_quant)
            context = context[row[:, None, None], window.clamp_min(0)]

            def attention(x: Tensor, attn: Attention = attn, context: Tensor = context) -> Tensor:
                _, q = attn.query(x, angles, ops)
                own = attn.key(x, angles, ops, cache_quant)
                keys = torch.cat((context, own), 2).flatten(0, 1)
                o = attend_block(q.flatten(0, 1), keys, mask, attn.attn_sink)
                return attn.output(o.unflatten(0, (B, A)), angles, ops)

            S, p, load = layer.run(S, p, attention, ops)
            if state is not None:
                state.loads[f"mtp.{layer.index - cfg.num_hidden_layers}"] = load
        z = hc_collapse(S, p)
        return self.head(ops.rms_norm(z, last.norm.weight, cfg.rms_norm_eps)), z

    def markov(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Logit bias `[..., V]` and embedding `[..., rank]` of the token before a draft."""
        head = self.mtp[-1].markov_head
        e = head.embed(previous)
        return head.head(e), e

    def confidence(self, z: Tensor, e: Tensor) -> Tensor:
        """Logit of the chance that a draft survives, given that the ones before it did."""
        return self.mtp[-1].confidence_head.proj(torch.cat((z, e), -1)).squeeze(-1)

    @torch.no_grad()
    def draft(
        self,
        ids: Tensor,
        anchor: Tensor,
        cache_quant: str = "reference",
        pick: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft one block after the whole of `ids` `[B,T]` and the sampled `anchor` `[B]`.

        `pick` maps logits `[B,V]` to tokens `[B]` (default: argmax). Returns drafts `[B,b]`, the
        logits they were picked from `[B,b,V]` and the confidences `[B,b]`.
        """
        T = ids.shape[1]
        at = ids.new_full((len(ids), 1), T - 1)
        known = torch.cat((ids, anchor[:, None]), 1)
        base, z = self.draft_block(self.features(ids, cache_quant), known, at, cache_quant)
        return self.draft_tokens(base[:, 0], z[:, 0], anchor, pick)

    def draft_tokens(
        self,
        base: Tensor,
        z: Tensor,
        anchor: Tensor,
        pick: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sequential part: base `[N,b,V]`, z `[N,b,H]`, anchor `[N]`."""
        pick = pick or (lambda logits: logits.argmax(-1))
        tokens, logits, confidences = [], [], []
        previous = anchor
        for k in range(base.shape[1]):
            bias, e = self.markov(previous)
            logits.append(base[:, k] + bias)
            confidences.append(torch.sigmoid(self.confidence(z[:, k], e)))
            previous = pick(logits[-1])
            tokens.append(previous)
        return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidences, 1)


# ------------------------------------------------------------------ checkpoint names
def checkpoint_names(twin: Twin) -> dict[str, Tensor]:
    """Tensors under their checkpoint names: experts one by one, views of the parameters."""
    out: dict[str, Tensor] = {}
    for name, tensor in twin.state_dict(keep_vars=True).items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts"):
            for e in range(tensor.shape[0]):
                out[f"{stem}.{e}.{kind}.weight"] = tensor[e]
        else:
            out[name] = tensor
    return out


def load_twin(folder: Path, dtype: torch.dtype = torch.float32) -> Twin:
    """The exported checkpoint (`config.json`, `tokenizer.json`, `model.safetensors`)."""
    from safetensors.torch import load_file
    from tokenizers import Tokenizer

    config = TwinConfig.from_dict(json.loads((folder / "config.json").read_text()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    twin = Twin(config, compress_vocabulary(tokenizer)).to(dtype)
    stored = load_file(folder / "model.safetensors")
    wanted = checkpoint_names(twin)
    if stored.keys() != wanted.keys():
        raise ValueError(
            f"{folder}: missing {sorted(wanted.keys() - stored.keys())[:3]}, "
            f"unknown {sorted(stored.keys() - wanted.keys())[:3]}: export it again"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])
    return twin
