"""Which tensors a checkpoint must hold for a config: name, shape and storage of each."""

from __future__ import annotations

from deepinfer_engine.model.checkpoint import Storage, TensorSpec
from deepinfer_engine.model.v41.config import ModelConfig, TextConfig
from deepinfer_engine.model.vision.weights import vision_tensors


def expected_tensors(config: ModelConfig, *, vision: bool = True) -> dict[str, TensorSpec]:
    """Every tensor of the model, with its shape and storage, in file order.

    vision: with the tower and the routing of image tokens, where the config has a tower.
    """
    c = config.text_config
    quantised = config.quantization_config is not None
    matrix: Storage = "fp8" if quantised else "float"
    H, V, D = c.hidden_size, c.vocab_size, c.head_dim
    out = {
        "embed.weight": TensorSpec((V, H)),
        "head.weight": TensorSpec((V, H)),
        "norm.weight": TensorSpec((H,)),
    }
    for layer in range(c.num_hidden_layers):
        p = f"layers.{layer}."
        out.update(_layer_specs(p, c, c.n_routed_experts, quantised=quantised))
        ratio = c.compress_ratios[layer]
        if layer in c.kv_source_layer_ids:
            out[p + "attn.compressor.wkv.weight"] = TensorSpec((D, H))
            if ratio > 1:
                out[p + "attn.compressor.wgate.weight"] = TensorSpec((D, H))
            out[p + "attn.compressor.norm.weight"] = TensorSpec((D,))
        if layer in c.index_source_layer_ids:
            out[p + "attn.indexer.wq_b.weight"] = TensorSpec(
                (c.index_n_heads * c.index_head_dim, c.q_lora_rank), matrix
            )
            out[p + "attn.indexer.weights_proj.weight"] = TensorSpec((c.index_n_heads, H))
        if layer in c.index_k_sources:
            out[p + "attn.indexer.wk.weight"] = TensorSpec((c.index_head_dim, D))
            out[p + "attn.indexer.k_norm.weight"] = TensorSpec((c.index_head_dim,))
        if layer in c.engram_layer_ids:
            rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
            columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
            out[p + "engram.embed.weight"] = TensorSpec(
                (rows, c.engram_head_dim), "fp8_rows" if quantised else "float"
            )
            out[p + "engram.wkv.weight"] = TensorSpec(((c.hc_mult + 1) * H, columns), matrix)
            out[p + "engram.q_weight"] = TensorSpec((c.hc_mult, H))
            out[p + "engram.k_weight"] = TensorSpec((c.hc_mult, H))
    last = c.num_nextn_predict_layers - 1
    for layer in range(c.num_nextn_predict_layers):
        out.update(_layer_specs(f"mtp.{layer}.", c, c.dspark_n_routed_experts, quantised=quantised))
    if last >= 0:
        rank = c.dspark_markov_rank
        out["mtp.0.main_proj.weight"] = TensorSpec((H, H * len(c.dspark_target_layer_ids)), matrix)
        out["mtp.0.main_norm.weight"] = TensorSpec((H,))
        out[f"mtp.{last}.norm.weight"] = TensorSpec((H,))
        out[f"mtp.{last}.markov_head.embed.weight"] = TensorSpec((V, rank))
        out[f"mtp.{last}.markov_head.head.weight"] = TensorSpec((V, rank))
        out[f"mtp.{last}.confidence_head.proj.weight"] = TensorSpec((1, H + rank))
    if vision and config.vision_config is not None:
        for name in [n for n in out if n.endswith(".gate.bias")]:
            out[name + "_vl"] = out[name]
        out.update(vision_tensors(config.vision_config, H))
    return out


def _layer_specs(p: str, c: TextConfig, experts: int, *, quantised: bool) -> dict[str, TensorSpec]:
    matrix: Storage = "fp8" if quantised else "float"
    expert: Storage = "fp4" if quantised else "float"
    H, D, heads = c.hidden_size, c.head_dim, c.num_attention_heads
    inner, shared = c.moe_intermediate_size, c.n_shared_experts * c.moe_intermediate_size
    out = {
        p + "attn_norm.weight": TensorSpec((H,)),
        p + "ffn_norm.weight": TensorSpec((H,)),
        p + "attn.wq_a.weight": TensorSpec((c.q_lora_rank, H), matrix),
        p + "attn.q_norm.weight": TensorSpec((c.q_lora_rank,)),
        p + "attn.wq_b.weight": TensorSpec((heads * D, c.q_lora_rank), matrix),
        p + "attn.wkv.weight": TensorSpec((D, H), matrix),
        p + "attn.kv_norm.weight": TensorSpec((D,)),
        p + "attn.wo_a.weight": TensorSpec(
            (c.o_groups * c.o_lora_rank, heads * D // c.o_groups), matrix
        ),
        p + "attn.wo_b.weight": TensorSpec((H, c.o_groups * c.o_lora_rank), matrix),
        p + "attn.attn_sink": TensorSpec((heads,), "float32"),
        p + "ffn.gate.weight": TensorSpec((experts, H)),
        p + "ffn.gate.bias": TensorSpec((experts,)),
        p + "ffn.shared_experts.w1.weight": TensorSpec((shared, H), matrix),
        p + "ffn.shared_experts.w3.weight": TensorSpec((shared, H), matrix),
        p + "ffn.shared_experts.w2.weight": TensorSpec((H, shared), matrix),
    }
    mixes = c.hc_mult * (c.hc_mult + 2)
    for part in ("attn", "ffn"):
        out[p + f"hc_{part}_fn"] = TensorSpec((mixes, c.hc_mult * H), "float32")
        out[p + f"hc_{part}_base"] = TensorSpec((mixes,), "float32")
        out[p + f"hc_{part}_scale"] = TensorSpec((3,), "float32")
    for e in range(experts):
        out[p + f"ffn.experts.{e}.w1.weight"] = TensorSpec((inner, H), expert)
        out[p + f"ffn.experts.{e}.w3.weight"] = TensorSpec((inner, H), expert)
        out[p + f"ffn.experts.{e}.w2.weight"] = TensorSpec((H, inner), expert)
    return out
