"""Writes a checkpoint in the released quantised layout, and its twin with the same values in bf16.

The encoders here are written on their own, value by value from the formats' definition, so that the
loader's decoders are compared with something.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_MATRICES = (
    "attn.wq_a", "attn.wq_b", "attn.wkv", "attn.wo_a", "attn.wo_b", "indexer.wq_b",
    "shared_experts.w1", "shared_experts.w2", "shared_experts.w3", "engram.wkv", "main_proj",
)  # fmt: skip


def write_quantised(
    source: Path, quantised: Path, twin: Path | None = None, *, prefix: str = "", shards: int = 1
) -> None:
    """`source` is a float checkpoint directory; `twin` gets the quantised values as bf16."""
    stored: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        scaled = _quantise(name, tensor.float())
        if scaled is None:
            stored[name] = decoded[name] = tensor
            continue
        values, scale, back = scaled
        stored[name] = values
        stored[name.removesuffix(".weight") + ".scale"] = scale
        decoded[name] = back.to(torch.bfloat16)
        assert torch.equal(decoded[name].float(), back), "a decoded weight is exact in bf16"
    _write(source, quantised, {prefix + k: v for k, v in stored.items()}, shards, QUANTIZATION)
    if twin is not None:
        _write(source, twin, decoded, 1, None)


def _quantise(name: str, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(stored values, stored scale, decoded float32), or None for a tensor kept as it is."""
    if ".experts." in name:
        blocks = w.unflatten(1, (-1, 32))
        scale = _power(blocks.abs().amax(-1), 6.0)
        unit = blocks / scale[..., None]
        code = (unit.abs()[..., None] - _FP4).abs().argmin(-1)
        nibble = (code + 8 * (unit < 0)).flatten(1).to(torch.uint8)
        packed = (nibble[:, 0::2] | (nibble[:, 1::2] << 4)).view(torch.int8)
        back = (_FP4[code] * torch.where(unit < 0, -1.0, 1.0) * scale[..., None]).flatten(1)
        return packed.contiguous(), _e8m0(scale), back
    if name.endswith("engram.embed.weight"):
        blocks = w.unflatten(1, (-1, 32))
        scale = _power(blocks.abs().amax(-1), 448.0)
        values = (blocks / scale[..., None]).to(torch.float8_e4m3fn)
        return values.flatten(1), _e8m0(scale), (values.float() * scale[..., None]).flatten(1)
    if any(name.endswith(f"{m}.weight") for m in _MATRICES) and "compressor" not in name:
        rows, columns = w.shape
        whole = torch.zeros(-(-rows // 32) * 32, -(-columns // 32) * 32)
        whole[:rows, :columns] = w
        blocks = whole.view(whole.shape[0] // 32, 32, -1, 32)
        scale = _power(blocks.abs().amax((1, 3)), 448.0)
        values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        back = (values.float() * scale[:, None, :, None]).view_as(whole)[:rows, :columns]
        stored = values.view_as(whole)[:rows, :columns]
        return stored.contiguous(), _e8m0(scale), back.contiguous()
    return None


def _power(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The smallest power of two that brings `amax` to at most `largest`."""
    return torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-30).double() / largest))).float()


def _e8m0(scale: torch.Tensor) -> torch.Tensor:
    exponent = torch.log2(scale.double()).round().to(torch.int64) + 127
    return exponent.to(torch.uint8).view(torch.float8_e8m0fnu)


def _write(
    source: Path, target: Path, tensors: dict[str, torch.Tensor], shards: int, quantization: Any
) -> None:
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "tokenizer.json", target)
    if shards == 1:
        save_file(tensors, target / "model.safetensors")
        return
    names = sorted(tensors)
    index: dict[str, str] = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n].clone() for n in names[i::shards]}
        save_file(part, target / shard)
        index.update(dict.fromkeys(part, shard))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
