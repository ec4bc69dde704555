"""What V4.1 shares with V4, beside the `deepseek_v4` model of transformers.

V4 norms each query head before the rotation, V4.1 does not; the norm is added to ours here. V4's
heavily compressed attention, at V4.1's ratios and with its position bias at zero, reads every
compressed entry: so does ours while the selection takes all.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Record
from tiny_checkpoint import write_tiny
from torch import Tensor

from deepinfer_engine import Model, load_model
from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41 import backbone as v41
from deepinfer_engine.model.v41.attention import Angles, Shared, query_key
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.weights import AttentionWeights, LayerWeights
from deepinfer_kernels import ops as kernels

v4 = pytest.importorskip(
    "transformers.models.deepseek_v4.modeling_deepseek_v4",
    reason="transformers >= 5.24 is not installed; run `nox -s oracle`",
)

AGAINST = "transformers"
LENGTH = 150
CLOSE = 1e-5
"""Of values of size 1 to 4 in float32; observed 1e-6."""

FEW = 7
"""Rows of a call to which the operators of few rows answer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Nothing selects here: more top-k and candidates than there are entries."""
    home = tmp_path_factory.mktemp("v4")
    path = write_tiny(home, seed=5, index_topk=256, candidate_topk_blocks=64)
    return load_model(path, dtype="float32", cache_quant="none")


ops = Operators("cpu")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def v4_config(c: TextConfig, ratio: int) -> Any:
    assert c.rope_scaling is not None
    config = v4.DeepseekV4Config(
        **c.model_dump(
            include={
                "vocab_size", "hidden_size", "moe_intermediate_size", "num_attention_heads",
                "head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "num_experts_per_tok",
                "n_routed_experts", "n_shared_experts", "routed_scaling_factor", "swiglu_limit",
                "max_position_embeddings", "rope_theta", "compress_rope_theta", "sliding_window",
                "rms_norm_eps", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "index_n_heads",
                "index_head_dim", "index_topk",
            }
        ),
        num_hidden_layers=2,
        qk_rope_head_dim=c.qk_rope_head_dim,
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        compress_rates={
            "compressed_sparse_attention": 4, "heavily_compressed_attention": max(ratio, 1)
        },
        mlp_layer_types=["moe", "moe"],
        rope_parameters=c.rope_scaling.model_dump(),
    )  # fmt: skip
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def filled(module: Any, **values: Tensor) -> Any:
    """The module with exactly these parameters and buffers, reshaped."""
    own = module.state_dict(keep_vars=True)
    assert set(own) == set(values)
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value.reshape(own[name].shape))
    return module.eval()


def v4_attention(c: TextConfig, w: LayerWeights, ratio: int) -> Any:
    a = w.attn
    values = {
        "q_a_proj.weight": a.wq_a,
        "q_a_norm.weight": a.q_norm,
        "q_b_proj.weight": a.wq_b,
        "kv_proj.weight": a.wkv,
        "kv_norm.weight": a.kv_norm,
        "o_a_proj.weight": a.wo_a,
        "o_b_proj.weight": a.wo_b,
        "sinks": a.sink,
    }
    if ratio:
        assert w.compressor is not None
        gate = w.compressor.wgate
        values |= {
            "compressor.kv_proj.weight": w.compressor.wkv,
            # One token a group: whatever its gate, its weight is 1.
            "compressor.gate_proj.weight": torch.zeros_like(a.wkv) if gate is None else gate,
            "compressor.kv_norm.weight": w.compressor.norm,
            "compressor.position_bias": torch.zeros(ratio, c.head_dim),
        }
    return filled(v4.DeepseekV4Attention(v4_config(c, ratio), 1 if ratio else 0), **values)


@torch.no_grad()
def their_attention(c: TextConfig, w: LayerWeights, ratio: int, x: Tensor) -> Tensor:
    module = v4_attention(c, w, ratio)
    at = torch.arange(len(x))[None]
    rotary = v4.DeepseekV4RotaryEmbedding(module.config)
    angles = {name: rotary(x[None], at, layer_type=name) for name in ("main", "compress")}
    back = at[0][:, None] - at[0][None, :]
    visible = (back >= 0) & (back < c.sliding_window)
    mask = torch.where(visible, 0.0, float("-inf"))[None, None]
    return module(x[None], angles, at, mask)[0][0]


def our_attention(model: Model, layer: int, x: Tensor, cuts: list[int]) -> Tensor:
    """The attention sub-layer of the runtime, the rows in pieces out of the cache."""
    backbone, cache = model._backbone, model.new_cache()
    cache.reserve(len(x))
    w, out = backbone.weights.layers[layer], []
    for start, end in itertools.pairwise([0, *cuts, len(x)]):
        ids = np.zeros(end - start, dtype=np.int64)
        rows = SequenceRows(ids, start, (), cache.blocks, cache.slot)
        batch = Batch(backbone.config, [rows])
        angles = backbone._angles(batch)
        with torch.inference_mode():
            backbone._write_entries(layer, w, x[start:end], batch, angles)
            out.append(backbone._attention(layer, w, x[start:end], batch, angles, Shared()))
    return torch.cat(out)


def with_normed_queries(
    ops: Operators,
    config: TextConfig,
    w: AttentionWeights,
    x: Tensor,
    angles: Angles,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """V4's queries: the per-head norm commutes with the rotation, so it may come after it."""
    latent, q, key = query_key(ops, config, w, x, angles, rounding)
    scale = torch.rsqrt(q.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return latent, q * scale, key


@pytest.mark.parametrize("layer", [0, 2, 6], ids=["window", "ratio 2", "ratio 1"])
def test_attention_with_sinks_entries_and_grouped_output(
    model: Model, record: Record, monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    c, x = model.config.text_config, drawn(LENGTH, model.config.text_config.hidden_size)
    ratio = c.compress_ratios[layer]
    theirs = their_attention(c, model._backbone.weights.layers[layer], ratio, x)
    plain = our_attention(model, layer, x, [])
    assert (plain - theirs).abs().max() > 0.1, "without the query norm the two models differ"
    monkeypatch.setattr(v41, "query_key", with_normed_queries)
    kind = f"window and ratio {ratio} entries" if ratio else "window"
    for cuts in ([], [31, 32, 33, 100, *range(140, 150)]):
        ours = our_attention(model, layer, x, cuts)
        assert record(f"attention output, {kind}, sinks", ours, theirs, AGAINST)[0] < CLOSE


def test_mixes_and_streams_of_one_sub_layer(model: Model, record: Record) -> None:
    c, layer = model.config.text_config, model._backbone.weights.layers[3]
    w = layer.attn_mix
    theirs = filled(
        v4.DeepseekV4HyperConnection(v4_config(c, 2)), fn=w.fn, base=w.base, scale=w.scale
    )
    norm = v4.DeepseekV4RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
    filled(norm, weight=layer.attn_norm)
    streams, y = drawn(LENGTH, c.hc_mult, c.hidden_size), drawn(LENGTH, c.hidden_size, seed=1)
    with torch.no_grad():
        post, comb, collapsed = (t[0] for t in theirs(streams[None]))
        normed = norm(collapsed)
    # V4 collapses with the mix of the same streams, V4.1 with the one before: asked for first here.
    _, _, pre, _, _ = v41.sub_layer(
        ops, c, w, layer.attn_norm, streams, drawn(LENGTH, c.hc_mult), None
    )
    expanded = post[..., None] * y[:, None] + torch.matmul(comb.transpose(-1, -2), streams)
    for size in (LENGTH, FEW):
        parts = [
            v41.sub_layer(ops, c, w, layer.attn_norm, s, p, None)
            for s, p in zip(streams.split(size), pre.split(size), strict=True)
        ]
        _, x, _, our_post, our_comb = (torch.cat(part) for part in zip(*parts, strict=True))
        assert record("mHC post mix", our_post, post, AGAINST)[0] < CLOSE
        assert record("mHC stream mix after Sinkhorn", our_comb, comb, AGAINST)[0] < CLOSE
        assert record("mHC collapsed and normed streams", x, normed, AGAINST)[0] < CLOSE
        pieces = [t.split(size) for t in (y, streams, our_post, our_comb)]
        our_expanded = torch.cat([ops.mhc_post(*p) for p in zip(*pieces, strict=True)])
        given = [
            v41.sub_layer(ops, c, w, layer.attn_norm, s, p, (o, post_mix, comb_mix))[0]
            for (o, s, post_mix, comb_mix), p in zip(
                zip(*pieces, strict=True), pre.split(size), strict=True
            )
        ]
        assert torch.equal(torch.cat(given), our_expanded), "at once with the next mix"
        assert record("mHC expanded streams", our_expanded, expanded, AGAINST)[0] < CLOSE


def test_expert_choice_weights_and_outputs(model: Model, record: Record) -> None:
    c, w = model.config.text_config, model._backbone.weights.layers[3].moe
    block = filled(
        v4.DeepseekV4SparseMoeBlock(v4_config(c, 2), 0),
        **{
            "gate.weight": w.gate,
            "gate.e_score_correction_bias": w.bias,
            "experts.gate_up_proj": torch.cat([w.w1, w.w3], dim=1),
            "experts.down_proj": w.w2,
            "shared_experts.gate_proj.weight": w.shared_w1,
            "shared_experts.up_proj.weight": w.shared_w3,
            "shared_experts.down_proj.weight": w.shared_w2,
        },
    )
    x = 6 * drawn(LENGTH, c.hidden_size)  # large, so that the limit of the activation binds
    with torch.no_grad():
        _, weight, index = block.gate(x[None])
        theirs = block(x[None])[0]
    our_index, our_weight = kernels.moe_gate(x, w.gate, w.bias, w.topk, c.routed_scaling_factor)
    order, our_order = index.sort(dim=-1), our_index.sort(dim=-1)
    assert torch.equal(order.values, our_order.values)
    chosen = our_weight.gather(1, our_order.indices), weight.gather(1, order.indices)
    assert record("expert weights", *chosen, AGAINST)[0] < CLOSE
    assert (x @ w.shared_w1.T > c.swiglu_limit).any()
    for size in (LENGTH, FEW):
        ours = torch.cat([v41.moe(ops, c, w, part) for part in x.split(size)])
        what = "experts and shared expert, of the largest output"
        largest = theirs.abs().max()
        assert record(what, ours / largest, theirs / largest, AGAINST)[0] < CLOSE


def test_index_scores_and_their_selection(model: Model, record: Record) -> None:
    c = model.config.text_config
    scorer = v4.DeepseekV4IndexerScorer(v4_config(c, 2))
    filled(scorer, **{"weights_proj.weight": drawn(c.index_n_heads, c.hidden_size, seed=4) / 8})
    heads, dim, entries = c.index_n_heads, c.index_head_dim, 90
    q, k = drawn(1, LENGTH, heads, dim), drawn(1, entries, dim, seed=1)
    x = drawn(1, LENGTH, c.hidden_size, seed=2)
    visible = torch.arange(LENGTH)[None].clamp(max=entries)
    with torch.no_grad():
        theirs = scorer(q, k, x)[0]
        w = scorer.weights_proj(x) * (heads * dim) ** -0.5
    hidden = torch.arange(entries) >= visible[0][:, None]
    ours = kernels.index_logits(q, k, w, visible)[0]
    assert torch.equal(ours == float("-inf"), hidden)
    shown = ours.masked_fill(hidden, 0), theirs.masked_fill(hidden, 0)
    assert record("index scores", *shown, AGAINST)[0] < CLOSE
    best = theirs.masked_fill(hidden, float("-inf")).topk(12)
    chosen = torch.where(best.values.isfinite(), best.indices, entries).sort(-1).values
    mine = kernels.topk_select(ours, 12)
    assert torch.equal(torch.where(mine < 0, entries, mine), chosen)
    # The runtime's operator scores and selects in one, out of pages, and shows its choice alone.
    page, pages = 16, torch.tensor([[4, 0, 6, 1, 3, 5]])
    cache = torch.zeros(7, page * dim * 4, dtype=torch.uint8)
    at = torch.arange(entries)
    kernels.kv_store(k[0], cache, pages[0, at // page] * page + at % page, "raw", page)
    for size in (LENGTH, FEW):
        parts = zip(*(t[0].split(size) for t in (q, w, visible)), strict=True)
        own = [
            ops.index_topk(
                queries, weights, cache, pages, torch.tensor([0, len(queries)]), seen,
                "raw", 12, page, 8, 0, None,
            )[0]
            for queries, weights, seen in parts
        ]  # fmt: skip
        mine = torch.cat(own)
        assert torch.equal(torch.where(mine < 0, entries, mine), chosen)


def test_rotary_angles(model: Model, record: Record) -> None:
    c, at = model.config.text_config, torch.arange(1000)
    rotary = v4.DeepseekV4RotaryEmbedding(v4_config(c, 2))
    for name, compressed in (("main", False), ("compress", True)):
        theirs = torch.cat(rotary(drawn(1), at[None], layer_type=name), -1)[0]
        ours = torch.cat(v41.Rope(c, compressed=compressed, dtype=torch.float32).at(at), -1)
        what = f"rotary cos and sin, {'YaRN' if compressed else 'plain'}, positions below 1000"
        assert record(what, ours, theirs, AGAINST)[0] < 1e-4
