"""A dense checkpoint as a GGUF file, written with the package `gguf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.gguf_weights import gguf_name


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF files of Llama hold them."""
    return x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def write_gguf(path: Path, folder: Path, arch: str, kind: str = "F32", **fields: Any) -> Path:
    """The model of a directory as one file; matrices in the given type."""
    c = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    if "head_dim" in c:
        writer.add_key_length(c["head_dim"])
    vocabulary = load_tokenizer(folder)
    tokens = [vocabulary.id_to_token(i) for i in range(c["vocab_size"])]
    kinds = [3 if i < 3 else 1 if i < 259 else 4 for i in range(len(tokens))]
    writer.add_tokenizer_model(fields.get("model", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"] if "ab" in tokens else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    type_ = gguf.GGMLQuantizationType[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        short = gguf_name(name.removeprefix("model."))
        x = tensor.numpy()
        if arch == "llama" and ".attn_q." in short:
            x = interleaved(x, c["num_attention_heads"])
        if arch == "llama" and ".attn_k." in short:
            x = interleaved(x, c["num_key_value_heads"])
        if x.ndim == 2 and kind != "F32":
            writer.add_tensor(short, gguf.quants.quantize(x, type_), raw_dtype=type_)
        else:
            writer.add_tensor(short, x.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
