"""Llama, Qwen2, Qwen3, Mistral: what they keep, the names of their weights, the forward pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.core.runner import CacheLayout, PrefillChunk
from deepinfer_engine.model.checkpoint import TensorSpec
from deepinfer_engine.model.dense.config import DenseConfig
from deepinfer_engine.model.family import LoadOptions
from deepinfer_engine.model.files import checked, model_fingerprint
from deepinfer_engine.model.linear import Matrix, MatrixReader
from deepinfer_engine.model.options import arithmetic, blocks_of, refuse_replay
from deepinfer_engine.model.paged import PagedBatch, PagedCache, paged_layout
from deepinfer_engine.model.rotary import Rotary
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.weights import open_weights

_UNREAD = re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq$")
_UNREAD_TIED = re.compile(rf"{_UNREAD.pattern}|lm_head\.weight$")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv and gate_up are fused from the files' three and two."""

    attn_norm: Tensor
    qkv: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    wo: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


def expected_tensors(c: DenseConfig) -> dict[str, TensorSpec]:
    """Every tensor of the model, by its name in the files without `model.`."""
    H, d, inner = c.hidden_size, c.head_width, c.intermediate_size
    q, kv = c.num_attention_heads * d, c.kv_heads * d
    out = {"embed_tokens.weight": (c.vocab_size, H), "norm.weight": (H,)}
    if not c.tie_word_embeddings:
        out["lm_head.weight"] = (c.vocab_size, H)
    for layer in range(c.num_hidden_layers):
        p = f"layers.{layer}."
        out[p + "input_layernorm.weight"] = out[p + "post_attention_layernorm.weight"] = (H,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{p}self_attn.{name}_proj.weight"] = (rows, H)
            if c.qkv_bias:
                out[f"{p}self_attn.{name}_proj.bias"] = (rows,)
        out[p + "self_attn.o_proj.weight"] = (H, q)
        if c.output_bias:
            out[p + "self_attn.o_proj.bias"] = (H,)
        if c.qk_norm:
            out[p + "self_attn.q_norm.weight"] = out[p + "self_attn.k_norm.weight"] = (d,)
        for name, shape in (("gate", (inner, H)), ("up", (inner, H)), ("down", (H, inner))):
            out[f"{p}mlp.{name}_proj.weight"] = shape
            if c.mlp_bias:
                out[f"{p}mlp.{name}_proj.bias"] = shape[:1]
    return {name: TensorSpec(shape) for name, shape in out.items()}


def load(
    model_dir: Path, options: LoadOptions, *, num_blocks: int | None, num_slots: int
) -> DenseModel:
    """See `Family.load`."""
    config = checked(model_dir, DenseConfig.model_validate)
    refuse_replay(options, "dense")
    dtype = arithmetic(options)
    layout = paged_layout(
        layers=config.num_hidden_layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_width,
        dtype=dtype,
        fingerprint=model_fingerprint(model_dir, batch_invariant=options.batch_invariant),
    )
    ignored = _UNREAD_TIED if config.tie_word_embeddings else _UNREAD
    ops = Operators(options.device.kind, batch_invariant=options.batch_invariant)
    with open_weights(model_dir, expected_tensors(config), ignored=ignored) as weights:
        keep = options.weights == "stored"
        return DenseModel(
            config,
            MatrixReader(weights, dtype, ops, keep_stored=keep),
            PagedCache(
                layout,
                num_blocks=blocks_of(num_blocks, layout.block_bytes),
                num_slots=num_slots,
                layers=config.num_hidden_layers,
                kv_heads=config.kv_heads,
                head_dim=config.head_width,
                dtype=dtype,
            ),
            ops,
        )


def _layer(reader: MatrixReader, c: DenseConfig, index: int) -> LayerWeights:
    p = f"layers.{index}."
    attn, mlp = p + "self_attn.", p + "mlp."
    return LayerWeights(
        attn_norm=reader.tensor(p + "input_layernorm.weight"),
        qkv=reader.matrix(*(f"{attn}{n}_proj" for n in "qkv"), bias=c.qkv_bias),
        q_norm=reader.tensor(attn + "q_norm.weight") if c.qk_norm else None,
        k_norm=reader.tensor(attn + "k_norm.weight") if c.qk_norm else None,
        wo=reader.matrix(attn + "o_proj", bias=c.output_bias),
        mlp_norm=reader.tensor(p + "post_attention_layernorm.weight"),
        gate_up=reader.matrix(mlp + "gate_proj", mlp + "up_proj", bias=c.mlp_bias),
        down=reader.matrix(mlp + "down_proj", bias=c.mlp_bias),
    )


class DenseModel:
    """Implements `LoadedModel`."""

    lookback = window = window_rows = window_layers = replay_keep = 0
    drafts = None

    def __init__(
        self, config: DenseConfig, reader: MatrixReader, cache: PagedCache, ops: Operators
    ) -> None:
        self._config = config
        self._cache = cache
        self._ops = ops
        self._scale = config.head_width**-0.5
        self._embed = reader.tensor("embed_tokens.weight")
        self._layers = [_layer(reader, config, i) for i in range(config.num_hidden_layers)]
        self._norm = reader.tensor("norm.weight")
        head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = reader.matrix(head, bias=False)
        if config.tie_word_embeddings and self._head.form is None:
            self._embed = self._head.weight
        self._rotary = Rotary(
            config.head_width,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
            wide=self._embed.dtype == torch.float64,
        )

    @property
    def config(self) -> DenseConfig:
        return self._config

    @property
    def layout(self) -> CacheLayout:
        return self._cache.layout

    @property
    def blocks(self) -> Tensor:
        return self._cache.blocks

    @property
    def states(self) -> Tensor:
        return self._cache.states

    def rows_of(self, chunk: PrefillChunk) -> SequenceRows:
        return SequenceRows(chunk.token_ids, chunk.start, (), chunk.block_table, chunk.state_slot)

    @torch.inference_mode()
    def forward(self, rows: Sequence[SequenceRows], logit_rows: Tensor | None) -> Tensor:
        c, ops, cache = self._config, self._ops, self._cache
        batch, eps = PagedBatch(rows), c.rms_norm_eps
        cos, sin = (torch.from_numpy(a) for a in self._rotary.at(batch.position))
        x = self._embed[batch.ids]
        hidden = ops.rms_norm(x, self._layers[0].attn_norm, eps)
        norms = [*(w.attn_norm for w in self._layers[1:]), self._norm]
        for i, (w, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            fused = w.qkv(hidden).view(len(x), -1, c.head_width)
            keys, values = cache.keys[i], cache.values[i]
            q = ops.qkv_rope_store(
                fused, w.q_norm, w.k_norm, eps, cos, sin, False, keys, values, batch.slot
            )
            out = ops.gqa_attention(
                q, keys, values, batch.table, batch.start, batch.first, self._scale
            )
            if logit_rows is not None and i + 1 == len(self._layers):
                out, x = out[logit_rows], x[logit_rows]  # nobody reads the others any more
            out = w.wo(out.flatten(1))
            hidden, x = ops.add_rms_norm(out, x, w.mlp_norm, eps)
            gated = ops.silu_mul(w.gate_up(hidden))
            hidden, x = ops.add_rms_norm(w.down(gated), x, next_norm, eps)
        # Ties and verification are decided by the logits: they are float32 whatever the dtype.
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        return self._head(hidden).to(wide)

    def dense_weights(self) -> list[Tensor]:
        held = [
            getattr(w, name) for w in self._layers for name in LayerWeights.__dataclass_fields__
        ]
        held += [self._norm, self._head]
        tensors = [t for h in held for t in (h.tensors if isinstance(h, Matrix) else [h])]
        return [t for t in tensors if isinstance(t, Tensor)]
