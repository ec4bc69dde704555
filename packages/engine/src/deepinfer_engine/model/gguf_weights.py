"""Tensors of a GGUF file, decoded. Blocks of 32 values for Q8_0, Q4_0 and Q4_1, of 256 for the K
kinds, which the package `gguf` decodes.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.model.checkpoint import TensorSpec, refuse_damage
from deepinfer_engine.model.gguf_file import INDEX, StoredTensor
from deepinfer_engine.model.weights import StoredMatrix

_WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$")
_INTERLEAVED = frozenset({"llama", "mistral"})
"""These files hold the rows of q and k in rotation pairs side by side; ours are halves."""

_FORMS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
"""Types that products read as they are stored."""


def gguf_name(name: str) -> str:
    """`layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    layer = _LAYER.match(name)
    if layer is None:
        stem, _, part = name.rpartition(".")
        return f"{_WHOLE[stem]}.{part}"
    return f"blk.{layer[1]}.{_PARTS[layer[2]]}.{layer[3]}"


class GgufWeights:
    """Implements `Weights` for a directory that `gguf_file` described."""

    def __init__(self, file: Path, expected: Mapping[str, TensorSpec]) -> None:
        self._file = file
        try:
            index = json.loads((file.parent / INDEX).read_text(encoding="utf-8"))
            stored = [
                StoredTensor(t["name"], t["kind"], tuple(t["shape"]), t["offset"], t["nbytes"])
                for t in index["tensors"]
            ]
            with file.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file}: cannot be read with {INDEX} ({error!r})") from None
        self._stored = {t.name: t for t in stored}
        self._heads: list[int] = index["heads"]
        self._interleaved = index["architecture"] in _INTERLEAVED
        try:
            self._check(expected)
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self._stored[gguf_name(name)]
        raw = np.frombuffer(self._map, np.uint8, stored.nbytes, stored.offset)
        out = decoded(raw, stored.kind).view(stored.shape).to(dtype, copy=True)
        del raw  # the map cannot be closed under a view
        refuse_damage(out, f"{self._file}: {stored.name}")
        return self._ordered(name, out)

    def stored(self, name: str) -> StoredMatrix | None:
        stored = self._stored[gguf_name(name)]
        form = _FORMS.get(stored.kind)
        if form is None or len(stored.shape) != 2:
            return None
        raw = np.frombuffer(self._map, np.uint8, stored.nbytes, stored.offset)
        rows = torch.from_numpy(raw.copy()).view(stored.shape[0], -1)
        refuse_damage(decoded(raw, stored.kind), f"{self._file}: {stored.name}")
        del raw
        return StoredMatrix(self._ordered(name, rows), form)

    def _ordered(self, name: str, x: Tensor) -> Tensor:
        """Rows, or the bytes of rows, in our order."""
        if self._interleaved and ".q_proj." in name:
            return _halves(x, self._heads[0])
        if self._interleaved and ".k_proj." in name:
            return _halves(x, self._heads[1])
        return x

    def _check(self, expected: Mapping[str, TensorSpec]) -> None:
        for name, spec in expected.items():
            stored = self._stored.get(gguf_name(name))
            if stored is None:
                raise CheckpointError(f"{self._file}: tensor {gguf_name(name)} is missing")
            if stored.shape != spec.shape:
                raise CheckpointError(
                    f"{self._file}: {stored.name} has shape {list(stored.shape)}, its own "
                    f"description asks for {list(spec.shape)}"
                )
        size, end = len(self._map), max(t.offset + t.nbytes for t in self._stored.values())
        if end > size:
            raise CheckpointError(f"{self._file}: has {size} bytes of {end}; get it again")


def _halves(x: Tensor, heads: int) -> Tensor:
    """Rows of each head: pairs side by side to first halves, then second halves."""
    split = x.view(heads, -1, 2, *x.shape[1:])
    return split.transpose(1, 2).reshape(x.shape).contiguous()


def decoded(raw: np.ndarray, kind: str) -> Tensor:
    """Bytes of whole blocks to values, flat; float32, or float16 and bfloat16 as stored."""
    data = torch.from_numpy(raw)
    if kind == "F32":
        return data.view(torch.float32)
    if kind == "F16":
        return data.view(torch.float16)
    if kind == "BF16":
        return data.view(torch.bfloat16)
    if kind == "Q8_0":
        blocks = data.view(-1, 34)
        return _scale(blocks, 0) * blocks[:, 2:].view(torch.int8)
    if kind == "Q4_0":
        blocks = data.view(-1, 18)
        return _scale(blocks, 0) * (_nibbles(blocks[:, 2:]) - 8)
    if kind == "Q4_1":
        blocks = data.view(-1, 20)
        return torch.addcmul(_scale(blocks, 2), _scale(blocks, 0), _nibbles(blocks[:, 4:]))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(raw.copy(), GGMLQuantizationType[kind]))


def _scale(blocks: Tensor, at: int) -> Tensor:
    """float32 [blocks, 1]: the half-precision number at these bytes of each block."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """float32 [blocks, 32]: low nibbles of the 16 bytes, then high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1).to(torch.float32)
