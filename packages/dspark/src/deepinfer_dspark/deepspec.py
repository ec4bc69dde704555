"""`DSparkDrafter`: block drafts from target features, in the DeepSpec checkpoint form (torch).

The backbone reads gamma rows, the anchor's embedding and gamma - 1 mask embeddings, attends
without causal mask inside the block and to context entries made from the target's hidden states at
positions strictly below the anchor's. Rank 0 (no Markov head) is plain DFlash: `DFlashDrafter`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from deepinfer_dspark.calibration import ProxyConfidence
from deepinfer_dspark.checkpoint import load_into, read_config, read_tensors
from deepinfer_dspark.contexts import Contexts, Entries, new_features
from deepinfer_dspark.drafting import DraftBatch
from deepinfer_dspark.errors import CheckpointError
from deepinfer_dspark.heads import ConfidenceHead, MarkovHead, MarkovType, draft_block
from deepinfer_dspark.proposal import Proposal
from deepinfer_dspark.torch_extra import Tensor, functional, nn, torch
from deepinfer_dspark.uniforms import Uniforms
from deepinfer_dspark.verification import VerifyResult


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
        known = {k: raw[k] for k in cls.__dataclass_fields__ if k in raw}
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
        self.c = c
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

    def context(self, features: Tensor, positions: Tensor) -> Entries:
        """Keys and values of every layer for target features [n, m*d] at positions [n]."""
        x = self.hidden_norm(self.fc(features))
        return [cast(Layer, layer).self_attn.entries(x, positions) for layer in self.layers]

    def block(
        self,
        anchors: Tensor,
        positions: Tensor,
        context: Entries,
        visible: Tensor,
    ) -> Tensor:
        """Normed hidden states [R, gamma, d]. anchors, positions: [R]; context: per layer padded
        [R, n, kv heads, d]; visible: bool [R, n]."""
        gamma = self.c.block_size
        ids = torch.full((anchors.shape[0], gamma), self.c.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        at = positions[:, None] + torch.arange(gamma, device=anchors.device)[None, :]
        x = self.embed_tokens(ids)
        for layer, (keys, values) in zip(self.layers, context, strict=True):
            x = layer(x, at, keys, values, visible)
        return self.norm(x)


class DSparkDrafter:
    """Drafts of a `DraftModule`; keeps the context entries of every request.

    The batch must carry `features` of all rows committed since the last round: the first round of
    a request brings the whole prompt but the anchor, or nothing (then no draft is made).
    temperatures: calibration, [gamma].
    """

    def __init__(self, module: DraftModule, temperatures: Any | None = None) -> None:
        self._module = module.eval()
        self._temperatures = temperatures
        self._contexts = Contexts()
        self._proxy = ProxyConfidence(module.c.block_size)
        self.max_tokens = module.c.block_size

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        embed: Tensor | None = None,
        lm_head: Tensor | None = None,
        temperatures: Any | None = None,
    ) -> DSparkDrafter:
        """Read config.json and *.safetensors of a DeepSpec checkpoint.

        embed, lm_head: the target's [V, d] weights where the checkpoint does not carry them.
        Raises CheckpointError naming what is missing, unknown or of another shape.
        """
        module = DraftModule(DeepSpecConfig.from_dict(read_config(directory)))
        weights = read_tensors(directory, strip=("model.", "draft."))
        if embed is not None:
            weights.setdefault("embed_tokens.weight", embed)
        if lm_head is not None:
            weights.setdefault("lm_head.weight", lm_head)
        load_into(module, weights, directory)
        return cls(module, temperatures)

    @torch.no_grad()
    def propose(self, batch: DraftBatch, rng: Uniforms) -> Proposal:
        """See `Drafter.propose`."""
        self._extend(batch)
        R, gamma = batch.requests, self.max_tokens
        ready = [i for i, r in enumerate(batch.request_ids) if r in self._contexts]
        tokens, lengths = np.zeros((R, gamma), dtype=np.int64), np.zeros(R, dtype=np.int64)
        conf = np.zeros((R, gamma))
        if not ready:
            return Proposal(tokens, lengths, conf=conf)
        index = np.array(ready)
        hidden = self._hidden(batch, index)
        m = self._module
        anchors = torch.from_numpy(batch.anchors[index])
        drafted = draft_block(
            m.lm_head(hidden), hidden, hidden, anchors, m.markov_head, m.confidence_head,
            batch.sampling.select(index), batch.rounds[index], rng, self._temperatures,
        )  # fmt: skip
        tokens[index], lengths[index] = drafted.tokens, gamma
        if self._module.confidence_head is None:
            ids = [batch.request_ids[i] for i in ready]
            conf[index] = self._proxy.of(ids, drafted.peak)
        else:
            conf[index] = drafted.conf
        q = drafted.q
        if q is not None and len(ready) < R:
            dense = q.new_zeros((R, gamma, q.shape[2]))
            dense[index] = q
            q = dense
        return Proposal(tokens, lengths, q=q, conf=conf)

    def _hidden(self, batch: DraftBatch, index: Any) -> Tensor:
        """Block hidden states of the given requests, their contexts padded to one length."""
        entries, visible = self._contexts.padded([batch.request_ids[i] for i in index.tolist()])
        anchors, positions = (torch.from_numpy(x[index]) for x in (batch.anchors, batch.positions))
        return self._module.block(anchors, positions, entries, visible)

    def _extend(self, batch: DraftBatch) -> None:
        for i, features, at in new_features(batch, self._contexts):
            new = self._module.context(features.to(self._module.fc.weight.dtype), at)
            self._contexts.append(batch.request_ids[i], new)

    def observe(self, request_ids: Sequence[Hashable], result: VerifyResult) -> None:
        """Without a confidence head the proxy follows what was accepted; a head needs nothing."""
        self._proxy.observe(request_ids, result)

    def reset(self, request_id: Hashable) -> None:
        """Drop the context of a request."""
        self._contexts.drop(request_id)
        self._proxy.reset(request_id)

    def fork(self, request_id: Hashable, new_id: Hashable) -> None:
        """Share the context: entries are never written in place."""
        self._contexts.fork(request_id, new_id)


class DFlashDrafter(DSparkDrafter):
    """The same backbone without a Markov head (rank 0); its drafts ignore each other."""

    def __init__(self, module: DraftModule, temperatures: Any | None = None) -> None:
        if module.markov_head is not None:
            raise CheckpointError("a DFlash checkpoint has markov_rank 0: use DSparkDrafter")
        super().__init__(module, temperatures)
