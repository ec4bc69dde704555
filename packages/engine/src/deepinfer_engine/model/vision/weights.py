"""The parameters of the vision tower, of the projector behind it, and of a span's marks.

Matrices are `[out, in]` in the model dtype, norm weights in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deepinfer_engine.model.checkpoint import TensorSpec
from deepinfer_engine.model.v41.config import VisionConfig

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One pre-norm block: wqkv [3d, d] is q, k, v; w1 [2i, d] is gate, up; w2 [d, i]."""

    norm1: Tensor
    wqkv: Tensor
    wqkv_bias: Tensor
    wo: Tensor
    wo_bias: Tensor
    norm2: Tensor
    w1: Tensor
    w2: Tensor


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """patch [d, 3 * patch * patch]; aligner w1 [H, d * cell * cell], w2 [H, H]; marks [H]."""

    patch: Tensor
    patch_bias: Tensor
    blocks: tuple[BlockWeights, ...]
    norm: Tensor
    aligner_w1: Tensor
    aligner_w1_bias: Tensor
    aligner_w2: Tensor
    aligner_w2_bias: Tensor
    start: Tensor
    newline: Tensor
    end: Tensor


def vision_tensors(v: VisionConfig, hidden_size: int) -> dict[str, TensorSpec]:
    """Every tensor of tower, projector and marks, with its shape, in file order."""
    d, inner, H = v.hidden_size, v.intermediate_size, hidden_size
    out = {
        "vision.patch_embed.proj.weight": (d, 3 * v.patch_size**2),
        "vision.patch_embed.proj.bias": (d,),
    }
    for i in range(v.num_hidden_layers):
        p = f"vision.blocks.{i}."
        out[p + "norm1.weight"] = (d,)
        out[p + "attn.wqkv.weight"] = (3 * d, d)
        out[p + "attn.wqkv.bias"] = (3 * d,)
        out[p + "attn.wo.weight"] = (d, d)
        out[p + "attn.wo.bias"] = (d,)
        out[p + "norm2.weight"] = (d,)
        out[p + "mlp.w1.weight"] = (2 * inner, d)
        out[p + "mlp.w2.weight"] = (d, inner)
    out["vision.norm.weight"] = (d,)
    out["aligner.w1.weight"] = (H, d * v.downsample_ratio**2)
    out["aligner.w1.bias"] = (H,)
    out["aligner.w2.weight"] = (H, H)
    out["aligner.w2.bias"] = (H,)
    for mark in ("start", "end", "newline"):
        out[f"image_{mark}"] = (H,)
    return {name: TensorSpec(shape) for name, shape in out.items()}


def read_vision(v: VisionConfig, matrix: Read, acc: Read) -> VisionWeights:
    """Read all of `vision_tensors`; `matrix` gives the model dtype, `acc` that of sums."""

    def block(p: str) -> BlockWeights:
        return BlockWeights(
            norm1=acc(p + "norm1.weight"),
            wqkv=matrix(p + "attn.wqkv.weight"),
            wqkv_bias=matrix(p + "attn.wqkv.bias"),
            wo=matrix(p + "attn.wo.weight"),
            wo_bias=matrix(p + "attn.wo.bias"),
            norm2=acc(p + "norm2.weight"),
            w1=matrix(p + "mlp.w1.weight"),
            w2=matrix(p + "mlp.w2.weight"),
        )

    return VisionWeights(
        patch=matrix("vision.patch_embed.proj.weight"),
        patch_bias=matrix("vision.patch_embed.proj.bias"),
        blocks=tuple(block(f"vision.blocks.{i}.") for i in range(v.num_hidden_layers)),
        norm=acc("vision.norm.weight"),
        aligner_w1=matrix("aligner.w1.weight"),
        aligner_w1_bias=matrix("aligner.w1.bias"),
        aligner_w2=matrix("aligner.w2.weight"),
        aligner_w2_bias=matrix("aligner.w2.bias"),
        start=matrix("image_start"),
        newline=matrix("image_newline"),
        end=matrix("image_end"),
    )
