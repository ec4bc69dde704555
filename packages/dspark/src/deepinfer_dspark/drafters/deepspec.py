"""Draft modules in the DeepSpec checkpoint form (torch); `DSparkDrafter` drafts with them.

The backbone reads gamma rows, the anchor's embedding and gamma - 1 mask embeddings, attends
without causal mask inside the block and to context entries made from the target's hidden states at
positions strictly below the anchor's. Rank 0 (no Markov head) is plain DFlash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deepinfer_dspark.drafters.block_module import BlockStates
from deepinfer_dspark.drafters.checkpoint import (
    load_into,
    read_config,
    read_tensors,
    rope_theta,
)
from deepinfer_dspark.drafters.contexts import Entries
from deepinfer_dspark.drafters.heads import ConfidenceHead, MarkovHead, MarkovType
from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.torch_extra import Tensor, functional, nn, torch


@dataclass(frozen=True, slots=True)
class DeepSpecConfig:
    """Sizes of a draft module; field names are the keys of its config.json."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int = 0
    markov_head_type: MarkovType = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DeepSpecConfig:
        """Take the known keys of a config.json; names the missing ones."""
        known = {k: raw[k] for k in cls.__dataclass_fields__ if k in raw} | rope_theta(raw)
        if "target_layer_ids" in known:
            known["target_layer_ids"] = tuple(known["target_layer_ids"])
        if "head_dim" not in known and {"hidden_size", "num_attention_heads"} <= known.keys():
            known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
        needed = {
            name for name, f in cls.__dataclass_fields__.items() if f.default is f.default_factory
        }
        missing = sorted(needed - known.keys())
        if missing:
            raise CheckpointError(f"draft config lacks {', '.join(missing)}")
        return cls(**known)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, halves convention. x: [..., n, heads, d]; positions: [..., n]."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angle = positions.float()[..., None] * theta ** (-steps / half)
    cos, sin = angle.cos()[..., None, :].to(x.dtype), angle.sin()[..., None, :].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention over context entries and the block, no mask inside the block."""

    def __init__(self, c: DeepSpecConfig) -> None:
        super().__init__()
        self.c = c
        width, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(width, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def entries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., n, kv heads, d] of inputs [..., n, hidden]."""
        shape = (*x.shape[:-1], self.c.num_key_value_heads, self.c.head_dim)
        keys = self.k_norm(self.k_proj(x).view(shape))
        return rotate(keys, positions, self.c.rope_theta), self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> Tensor:
        """x: [R, gamma, hidden]; keys, values: [R, n, kv heads, d]; visible: bool [R, n]."""
        R, gamma = x.shape[:2]
        own_k, own_v = self.entries(x, positions)
        k, v = torch.cat([keys, own_k], dim=1), torch.cat([values, own_v], dim=1)
        q = self.q_norm(self.q_proj(x).view(R, gamma, self.c.num_attention_heads, self.c.head_dim))
        q = rotate(q, positions, self.c.rope_theta)
        block = visible.new_ones(R, gamma)
        mask = torch.cat([visible, block], dim=1)[:, None, None, :]
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        k, v = (t.repeat_interleave(groups, dim=2).transpose(1, 2) for t in (k, v))
        out = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(R, gamma, -1))


class MLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c: DeepSpecConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c.hidden_size, c.intermediate_size)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, keys, values, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModule(nn.Module):
    """Backbone and heads; parameter names are those of DeepSpec checkpoints.

    Embedding and LM head are the target's; a checkpoint may carry copies of them.
    """

    def __init__(self, c: DeepSpecConfig) -> None:
        super().__init__()
        self.c, self.block_size = c, c.block_size
        self.window: int | None = None
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.markov_head = (
            MarkovHead(c.vocab_size, c.markov_rank, c.markov_head_type, c.hidden_size)
            if c.markov_rank
            else None
        )
        rank = c.markov_rank if c.confidence_head_with_markov else 0
        self.confidence_head = (
            ConfidenceHead(c.hidden_size, rank, bias=True) if c.enable_confidence_head else None
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the features it wants."""
        return self.fc.weight.dtype

    def context(self, features: Tensor, positions: Tensor) -> Entries:
        """Keys and values of every layer for target features [n, m*d] at positions [n]."""
        x = self.hidden_norm(self.fc(features))
        return [cast(Layer, layer).self_attn.entries(x, positions) for layer in self.layers]

    def block(
        self, anchors: Tensor, positions: Tensor, context: Entries, visible: Tensor
    ) -> BlockStates:
        """See `BlockModule.block`; both heads read the normed states."""
        gamma = self.c.block_size
        ids = torch.full((anchors.shape[0], gamma), self.c.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        at = positions[:, None] + torch.arange(gamma, device=anchors.device)[None, :]
        x = self.embed_tokens(ids)
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            x = layer(x, at, keys, values, visible)
        hidden = self.norm(x)
        return BlockStates(self.lm_head(hidden), hidden, hidden)


def load_deepspec(
    directory: Path,
    *,
    embed: Tensor | None = None,
    lm_head: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> DraftModule:
    """Read config.json and *.safetensors of a DeepSpec checkpoint.

    embed, lm_head: the target's [V, d] weights where the checkpoint does not carry them; dtype:
    what to compute in, default that of the checkpoint.
    Raises CheckpointError naming what is missing, unknown or of another shape.
    """
    module = DraftModule(DeepSpecConfig.from_dict(read_config(directory)))
    weights = read_tensors(directory, strip=("model.", "draft."))
    if embed is not None:
        weights.setdefault("embed_tokens.weight", embed)
    if lm_head is not None:
        weights.setdefault("lm_head.weight", lm_head)
    load_into(module, weights, directory)
    return (module if dtype is None else module.to(dtype)).eval()
