"""Write a training state as the checkpoint that the engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokens import save_tokenizer
from twin import Twin, checkpoint_names

SINGLE = ("hc_attn_", "hc_ffn_", "attn_sink", "gate.bias")  # stored as float32


def stored_dtype(name: str) -> torch.dtype:
    return torch.float32 if any(part in name for part in SINGLE) else torch.bfloat16


def export(twin: Twin, tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> int:
    """Write config, tokenizer and weights; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(stored_dtype(name)).contiguous().clone()
        for name, tensor in checkpoint_names(twin).items()
    }
    target = folder / "model.safetensors"
    draft = folder / "model.safetensors.part"
    save_file(tensors, draft, metadata={"format": "pt"})
    draft.chmod(0o644)
    draft.rename(target)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    return target.stat().st_size
