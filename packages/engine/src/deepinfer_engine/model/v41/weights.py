"""The parameters of a V4.1 model as plain tensors, one frozen record a part.

Matrices are `[out, in]` in the model dtype. Norm weights, mixes, sinks, routing biases and the
vocabulary head are in the accumulation dtype (float32, or float64 in a float64 model). Routed
experts are stacked `[E, ...]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from deepinfer_engine.core.runner import IntArray
from deepinfer_engine.model.checkpoint import Checkpoint
from deepinfer_engine.model.rows import RowTable
from deepinfer_engine.model.v41.config import ModelConfig, TextConfig
from deepinfer_engine.model.v41.expected import expected_tensors
from deepinfer_engine.model.vision.weights import VisionWeights, read_vision, vision_tensors


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for a float64 model, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_TIED = re.compile(r"mtp\.\d+\.(embed|head)\.")
"""Drafts share these with the backbone."""
_PICTURES = re.compile(r"vision\.|aligner\.|image_(start|end|newline)$|.*\.gate\.bias_vl$")
"""Not read where the text model runs alone."""
_TOWER = re.compile(r"vision\.|aligner\.|image_(start|end|newline)$")
"""... and where another process computes the embeddings of pictures."""
_TIED_OR_TOWER = re.compile(f"{_TIED.pattern}|{_TOWER.pattern}")
_TIED_OR_PICTURES = re.compile(f"{_TIED.pattern}|{_PICTURES.pattern}")


@dataclass(frozen=True, slots=True)
class MixWeights:
    """One sub-layer's hyper-connection: fn [h(h+2), h*H], base [h(h+2)], scale [3]."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """wo_a is kept as [groups, o_rank, heads/groups * D]."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    wo_a: Tensor
    wo_b: Tensor
    sink: Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """wgate is None where the ratio is 1."""

    wkv: Tensor
    wgate: Tensor | None
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexKeyWeights:
    """Projection of a compressed latent to an index key."""

    wk: Tensor
    norm: Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Query side of a top-k source."""

    wq_b: Tensor
    weights_proj: Tensor


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """w1, w3 [E, I, H]; w2 [E, H, I]; shared_* are one wider MLP. Where a process holds a share of
    the experts, E is the number of its slots in these three.

    bias, bias_vl [E] rank experts for text and for tokens of pictures.
    """

    gate: Tensor
    bias: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    shared_w1: Tensor
    shared_w3: Tensor
    shared_w2: Tensor
    topk: int
    bias_vl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """table [rows, dim], which stays on disk, and the gate of one Engram layer."""

    table: RowTable
    wkv: Tensor
    q_weight: Tensor
    k_weight: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, backbone or draft."""

    attn_norm: Tensor
    ffn_norm: Tensor
    attn_mix: MixWeights
    ffn_mix: MixWeights
    attn: AttentionWeights
    moe: MoeWeights
    compressor: CompressorWeights | None = None
    index_key: IndexKeyWeights | None = None
    indexer: IndexerWeights | None = None
    engram: EngramWeights | None = None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The DSpark draft module around its layers."""

    layers: tuple[LayerWeights, ...]
    main_proj: Tensor
    main_norm: Tensor
    norm: Tensor
    markov_embed: Tensor
    markov_head: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything a model needs; `vision` is None where it takes no pictures."""

    embed: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None
    vision: VisionWeights | None = None


def tensors_of(part: object) -> list[Tensor]:
    """All tensors in memory of a weights record, nested records and tuples of records included."""
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, tuple):
        return [t for item in cast("tuple[object, ...]", part) for t in tensors_of(item)]
    if is_dataclass(part):
        return [t for field in fields(part) for t in tensors_of(getattr(part, field.name))]
    return []


def load_weights(
    model_dir: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    vision: bool = True,
    tower: bool = True,
    held: IntArray | None = None,
) -> ModelWeights:
    """Check the whole checkpoint, then read it.

    vision: with the routing of image tokens, where the config has a tower, and with the tower
        unless `tower` is False; what is not read may be absent.
    held: int [layers, slots], the routed experts to read of each backbone layer, one a slot;
        default all. Draft layers are always whole.

    Raises CheckpointError naming the tensor or file at fault. Tied draft embeddings are allowed
    and not read.
    """
    c = config.text_config
    sees = config.vision_config if vision else None
    with _checked(model_dir, config, vision=vision, tower=tower) as checkpoint:
        reader = _Reader(checkpoint, c, dtype, images=sees is not None)
        layers = tuple(
            reader.layer(
                f"layers.{i}.",
                i,
                range(c.n_routed_experts) if held is None else held[i].tolist(),
                c.num_experts_per_tok,
            )
            for i in range(c.num_hidden_layers)
        )
        return ModelWeights(
            embed=reader.matrix("embed.weight"),
            head=reader.acc("head.weight"),
            norm=reader.acc("norm.weight"),
            layers=layers,
            draft=reader.draft() if c.num_nextn_predict_layers else None,
            vision=read_vision(sees, reader.matrix, reader.acc) if sees and tower else None,
        )


def check_weights(model_dir: Path, config: ModelConfig) -> int:
    """Check names, shapes and types of a whole checkpoint without reading a weight.

    Returns the number of its files; raises CheckpointError naming the tensor or file at fault.
    """
    with _checked(model_dir, config, vision=True) as checkpoint:
        return checkpoint.files


def load_vision(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> VisionWeights:
    """Read the tower and nothing else; the rest of the checkpoint may be absent.

    Raises CheckpointError naming the tensor or file at fault.
    """
    assert config.vision_config is not None
    expected = vision_tensors(config.vision_config, config.text_config.hidden_size)
    with Checkpoint(model_dir, expected, ignored=re.compile("")) as checkpoint:
        reader = _Reader(checkpoint, config.text_config, dtype, images=True)
        return read_vision(config.vision_config, reader.matrix, reader.acc)


def _checked(
    model_dir: Path, config: ModelConfig, *, vision: bool, tower: bool = True
) -> Checkpoint:
    expected = expected_tensors(config, vision=vision)
    unread = _TIED
    if not vision or config.vision_config is None:
        unread = _TIED_OR_PICTURES
    elif not tower:
        unread = _TIED_OR_TOWER
        expected = {name: spec for name, spec in expected.items() if not _TOWER.match(name)}
    return Checkpoint(model_dir, expected, ignored=unread)


class _Reader:
    def __init__(
        self, checkpoint: Checkpoint, config: TextConfig, dtype: torch.dtype, *, images: bool
    ) -> None:
        self._images = images
        self._checkpoint = checkpoint
        self._c = config
        self._dtype = dtype
        self._acc = accumulation_dtype(dtype)

    def matrix(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name, self._dtype)

    def acc(self, name: str) -> Tensor:
        return self._checkpoint.tensor(name, self._acc)

    def layer(self, p: str, layer: int | None, experts: Sequence[int], topk: int) -> LayerWeights:
        c = self._c
        is_kv = layer is not None and layer in c.kv_source_layer_ids
        gated = layer is not None and c.compress_ratios[layer] > 1
        compressor = index_key = indexer = engram = None
        if is_kv:
            compressor = CompressorWeights(
                wkv=self.matrix(p + "attn.compressor.wkv.weight"),
                wgate=self.matrix(p + "attn.compressor.wgate.weight") if gated else None,
                norm=self.acc(p + "attn.compressor.norm.weight"),
            )
        if layer in c.index_k_sources:
            index_key = IndexKeyWeights(
                wk=self.matrix(p + "attn.indexer.wk.weight"),
                norm=self.acc(p + "attn.indexer.k_norm.weight"),
            )
        if layer in c.index_source_layer_ids:
            indexer = IndexerWeights(
                wq_b=self.matrix(p + "attn.indexer.wq_b.weight"),
                weights_proj=self.matrix(p + "attn.indexer.weights_proj.weight"),
            )
        if layer in c.engram_layer_ids:
            engram = EngramWeights(
                table=self._checkpoint.rows(p + "engram.embed.weight", self._dtype),
                wkv=self.matrix(p + "engram.wkv.weight"),
                q_weight=self.acc(p + "engram.q_weight"),
                k_weight=self.acc(p + "engram.k_weight"),
            )
        return LayerWeights(
            attn_norm=self.acc(p + "attn_norm.weight"),
            ffn_norm=self.acc(p + "ffn_norm.weight"),
            attn_mix=self._mix(p + "hc_attn_"),
            ffn_mix=self._mix(p + "hc_ffn_"),
            attn=self._attention(p + "attn."),
            moe=self._moe(p + "ffn.", experts, topk),
            compressor=compressor,
            index_key=index_key,
            indexer=indexer,
            engram=engram,
        )

    def draft(self) -> DraftWeights:
        c = self._c
        count = c.num_nextn_predict_layers
        last = f"mtp.{count - 1}."
        return DraftWeights(
            layers=tuple(
                self.layer(
                    f"mtp.{i}.",
                    None,
                    range(c.dspark_n_routed_experts),
                    c.dspark_num_experts_per_tok,
                )
                for i in range(count)
            ),
            main_proj=self.matrix("mtp.0.main_proj.weight"),
            main_norm=self.acc("mtp.0.main_norm.weight"),
            norm=self.acc(last + "norm.weight"),
            markov_embed=self.matrix(last + "markov_head.embed.weight"),
            markov_head=self.matrix(last + "markov_head.head.weight"),
            confidence=self.acc(last + "confidence_head.proj.weight"),
        )

    def _mix(self, p: str) -> MixWeights:
        return MixWeights(
            fn=self.acc(p + "fn"), base=self.acc(p + "base"), scale=self.acc(p + "scale")
        )

    def _attention(self, p: str) -> AttentionWeights:
        c = self._c
        return AttentionWeights(
            wq_a=self.matrix(p + "wq_a.weight"),
            q_norm=self.acc(p + "q_norm.weight"),
            wq_b=self.matrix(p + "wq_b.weight"),
            wkv=self.matrix(p + "wkv.weight"),
            kv_norm=self.acc(p + "kv_norm.weight"),
            wo_a=self.matrix(p + "wo_a.weight").view(c.o_groups, c.o_lora_rank, -1),
            wo_b=self.matrix(p + "wo_b.weight"),
            sink=self.acc(p + "attn_sink"),
        )

    def _moe(self, p: str, experts: Sequence[int], topk: int) -> MoeWeights:
        def stacked(part: str) -> Tensor:
            first = self.matrix(f"{p}experts.{experts[0]}.{part}.weight")
            # Filled in place: a list and its stack would hold every expert twice.
            out = first.new_empty(len(experts), *first.shape)
            out[0] = first
            for slot, e in enumerate(experts[1:], start=1):
                out[slot] = self.matrix(f"{p}experts.{e}.{part}.weight")
            return out

        return MoeWeights(
            gate=self.acc(p + "gate.weight"),
            bias=self.acc(p + "gate.bias"),
            w1=stacked("w1"),
            w3=stacked("w3"),
            w2=stacked("w2"),
            shared_w1=self.matrix(p + "shared_experts.w1.weight"),
            shared_w3=self.matrix(p + "shared_experts.w3.weight"),
            shared_w2=self.matrix(p + "shared_experts.w2.weight"),
            topk=topk,
            bias_vl=self.acc(p + "gate.bias_vl") if self._images else None,
        )
