"""V4.1 draft modules: formulas recomputed in plain Python, quantised storage, named failures.

That whole modules draft as the model's own runtime does is tested there, on its checkpoints.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from deepinfer_dspark import CheckpointError, CounterRng, DraftBatch, SamplingBatch

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from deepinfer_dspark.drafters.block import DSparkDrafter  # noqa: E402
from deepinfer_dspark.drafters.v41 import V41DraftModule, dequantised, load_v41  # noqa: E402
from deepinfer_dspark.drafters.v41_layers import (  # noqa: E402
    V41Config,
    V41Layer,
    V41MoE,
    collapse,
    expand,
    rotate,
    round_key,
)

TEXT = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
    "moe_intermediate_size": 32, "sliding_window": 6, "num_nextn_predict_layers": 2,
    "dspark_block_size": 3, "dspark_noise_token_id": 3, "dspark_target_layer_ids": [2, 3],
    "dspark_markov_rank": 8, "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
CONFIG = {"model_type": "deepseek_v41", "text_config": TEXT}


def weights(seed: int = 0) -> dict:
    """Random tensors under checkpoint names."""
    g = torch.Generator().manual_seed(seed)
    module = V41DraftModule(V41Config.from_dict(CONFIG))
    names = {
        "markov_head.markov_w1.weight": "mtp.1.markov_head.embed.weight",
        "markov_head.markov_w2.weight": "mtp.1.markov_head.head.weight",
        "confidence_head.proj.weight": "mtp.1.confidence_head.proj.weight",
    }
    out = {}
    for name, tensor in module.state_dict().items():
        drawn = torch.randn(tensor.shape, generator=g) / math.sqrt(max(tensor.shape[-1], 4))
        drawn = drawn + 1.0 if "norm" in name else drawn
        stem, _, kind = name.rpartition(".")
        if stem.endswith(".experts"):
            for e in range(tensor.shape[0]):
                out[f"{stem}.{e}.{kind}.weight"] = drawn[e].clone()
        else:
            out[names.get(name, name)] = drawn
    out["mtp.0.ffn.gate.bias_vl"] = torch.zeros(4)
    out["mtp.1.embed.weight"] = torch.zeros(1)
    out["layers.0.attn_norm.weight"] = torch.zeros(32)  # the backbone's: not read
    return out


def write(path, tensors: dict, config: dict = CONFIG, prefix: str = "") -> None:
    (path / "config.json").write_text(json.dumps(config))
    named = {prefix + k: v.contiguous() for k, v in tensors.items()}
    half = len(named) // 2
    for i, part in enumerate((list(named)[:half], list(named)[half:])):
        safetensors.save_file({k: named[k] for k in part}, path / f"model-{i}.safetensors")


def batch(count: int, temperature: float = 0.0, seed: int = 0) -> DraftBatch:
    g = torch.Generator().manual_seed(seed)
    return DraftBatch(
        [0], np.array([7]), np.array([count]), [[7] * (count + 1)],
        SamplingBatch.uniform(1, temperature=temperature), np.zeros(1, dtype=np.int64),
        torch.randn(count, 64, generator=g), np.array([0, count]),
    )  # fmt: skip


def test_mixes_and_streams_follow_the_formulas() -> None:
    c = V41Config.from_dict(TEXT | {"hc_sinkhorn_iters": 3})
    torch.manual_seed(0)
    layer = V41Layer(c, first=False, last=False).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    h, H, eps = 4, 32, c.hc_eps
    streams = torch.randn(h, H, dtype=torch.float64)
    flat = [float(v) for v in streams.flatten()]
    fn, base, scale = (layer.get_parameter(f"hc_ffn_{x}").tolist() for x in ("fn", "base", "scale"))
    inverse = 1.0 / math.sqrt(sum(v * v for v in flat) / len(flat) + c.rms_norm_eps)
    m = [sum(a * b for a, b in zip(row, flat, strict=True)) * inverse for row in fn]

    def sigmoid(x):
        return 1.0 / (1.0 + math.exp(-x))

    pre = [sigmoid(m[j] * scale[0] + base[j]) + eps for j in range(h)]
    post = [2.0 * sigmoid(m[h + j] * scale[1] + base[h + j]) for j in range(h)]
    comb = []
    for i in range(h):
        row = [m[2 * h + i * h + k] * scale[2] + base[2 * h + i * h + k] for k in range(h)]
        total = sum(math.exp(v) for v in row)
        comb.append([math.exp(v) / total + eps for v in row])
    for step in range(3):
        if step:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        columns = [sum(comb[i][k] for i in range(h)) + eps for k in range(h)]
        comb = [[comb[i][k] / columns[k] for k in range(h)] for i in range(h)]
    got = layer.mix(streams[None], "ffn")
    for mine, theirs in zip(got, (pre, post, comb), strict=True):
        assert torch.allclose(mine[0], torch.tensor(theirs, dtype=torch.float64), atol=1e-12)
    y = torch.randn(H, dtype=torch.float64)
    for k in range(h):
        by_hand = post[k] * y + sum(comb[j][k] * streams[j] for j in range(h))
        assert torch.allclose(expand(y, streams, got[1][0], got[2][0])[k], by_hand, atol=1e-12)
    assert torch.allclose(
        collapse(streams, got[0][0]), sum(pre[j] * streams[j] for j in range(h)), atol=1e-12
    )


def test_experts_are_chosen_with_the_bias_and_weighted_without_it() -> None:
    c = V41Config.from_dict(TEXT)
    moe = V41MoE(c).double().requires_grad_(False)
    torch.manual_seed(1)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.7)
    x = torch.randn(1, 1, 32, dtype=torch.float64)
    score = [math.sqrt(math.log1p(math.exp(float(v)))) for v in moe.gate.weight @ x[0, 0]]
    order = sorted(range(4), key=lambda e: (-(score[e] + float(moe.gate.bias[e])), e))[:2]
    total = sum(score[e] for e in order)

    def act(g, u):
        g = torch.clamp(g, max=10.0)
        return g * torch.sigmoid(g) * torch.clamp(u, -10.0, 10.0)

    v = x[0, 0]
    expected = moe.shared_experts.w2(act(moe.shared_experts.w1(v), moe.shared_experts.w3(v)))
    for e in order:
        w1, w3, w2 = moe.experts.w1[e], moe.experts.w3[e], moe.experts.w2[e]
        expected = expected + 1.5 * score[e] / total * (w2 @ act(w1 @ v, w3 @ v))
    assert torch.allclose(moe(x)[0, 0], expected, atol=1e-12)
    moe.gate.bias.data = torch.zeros(4, dtype=torch.float64)
    moe.gate.weight.data.zero_()  # all scores are equal: the lower index wins
    assert moe.route(x[0])[0].tolist() == [[0, 1]]


def test_rotation_turns_the_last_channels_as_pairs_and_back() -> None:
    x = torch.randn(1, 3, 2, 6, dtype=torch.float64)
    at = torch.tensor([[0, 5, 9]])
    turned = rotate(x, at, 4, 100.0)
    assert torch.equal(turned[..., :2], x[..., :2])
    for i, position in enumerate((0, 5, 9)):
        for pair in range(2):
            z = torch.view_as_complex(x[0, i, 1, 2 + 2 * pair : 4 + 2 * pair].contiguous())
            angle = torch.tensor(position * 100.0 ** (-2.0 * pair / 4), dtype=torch.float64)
            expected = z * torch.polar(torch.ones((), dtype=torch.float64), angle)
            got = torch.view_as_complex(turned[0, i, 1, 2 + 2 * pair : 4 + 2 * pair].contiguous())
            assert torch.allclose(got, expected)
    assert torch.allclose(rotate(turned, at, 4, 100.0, -1.0), x)


def test_keys_are_rounded_with_the_smallest_power_of_two_that_fits() -> None:
    x = torch.zeros(4, 32)
    # the smallest code tells the scales apart: it is 2^-9 of the scale
    x[0, :4] = torch.tensor([448.0, 1.0, -3.3, 2.0**-9])  # scale 1
    x[1, :4] = torch.tensor([449.0, 1.0, -3.3, 2.0**-9])  # scale 2
    x[2, 0] = 1e-9  # scale never below 2^-22, the power above 1e-4 / 448
    got = round_key(x)
    assert got[0, :4].tolist() == [448.0, 1.0, -3.25, 2.0**-9]
    assert got[1, :4].tolist() == [448.0, 1.0, -3.25, 0.0]
    assert got[2, 0] == 2.0**-8 * 2.0**-22
    assert got[3].abs().max() == 0.0
    for row in torch.randn(50, 32):
        peak = float(row.abs().max())
        step = 2.0 ** math.ceil(math.log2(peak / 448.0))
        assert torch.allclose(round_key(row), row, atol=peak / 16)
        assert torch.equal(round_key(row) / step, (row / step).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_directory_loads_under_both_spellings_and_drafts(tmp_path, prefix: str) -> None:
    write(tmp_path, weights(), prefix=prefix)
    drafter = DSparkDrafter.load(tmp_path)
    out = drafter.propose(batch(9, temperature=0.8), CounterRng())
    assert drafter.max_tokens == 3
    assert out.lengths.tolist() == [3]
    assert np.isfinite(out.conf).all()
    assert torch.allclose(out.q.sum(-1), torch.ones(1, 3, dtype=torch.float64))


def test_only_the_window_before_the_anchor_matters(tmp_path) -> None:
    write(tmp_path, weights())
    far, near = batch(12), batch(12)
    far.features[: 12 - TEXT["sliding_window"]] += 5.0
    a, b = (DSparkDrafter.load(tmp_path).propose(x, CounterRng()) for x in (far, near))
    assert np.array_equal(a.conf, b.conf)
    far.features[12 - TEXT["sliding_window"]] += 5.0
    c = DSparkDrafter.load(tmp_path).propose(far, CounterRng())
    assert not np.array_equal(b.conf, c.conf)


def test_bf16_checkpoints_keep_mixes_and_sinks_in_float32(tmp_path) -> None:
    write(tmp_path, {k: v if "hc_" in k or "sink" in k else v.bfloat16()
                     for k, v in weights().items()})  # fmt: skip
    module = load_v41(tmp_path)
    assert module.dtype == torch.bfloat16
    assert module.layers[0].attn.attn_sink.dtype == torch.float32
    assert module.layers[1].get_parameter("hc_attn_fn").dtype == torch.float32
    out = DSparkDrafter(module).propose(batch(9), CounterRng())
    assert np.isfinite(out.conf).all()


def test_fp8_and_fp4_storage_is_what_its_codes_say() -> None:
    scale = torch.tensor([[2.0, 0.5], [1.0, 4.0]]).to(torch.float8_e8m0fnu)
    stored = torch.ones(40, 50).to(torch.float8_e4m3fn)
    got = dequantised("w.weight", {"w.weight": stored, "w.scale": scale})
    assert got.shape == (40, 50)
    assert (got[:32, :32] == 2).all()
    assert (got[:32, 32:] == 0.5).all()
    assert (got[32:, 32:] == 4).all()
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    codes[0, 0] = 0x72  # even column 1.0, odd column 6.0
    codes[1, 31] = 0xF9  # even column -0.5, odd column -6.0
    row_scale = torch.tensor([[1.0, 1.0], [1.0, 2.0]])
    got = dequantised("w.weight", {"w.weight": codes.view(torch.int8), "w.scale": row_scale})
    assert got[0, :2].tolist() == [1.0, 6.0]
    assert got[1, 62:].tolist() == [-1.0, -12.0]
    with pytest.raises(CheckpointError, match=r"needs w\.scale"):
        dequantised("w.weight", {"w.weight": codes.view(torch.int8)})
    with pytest.raises(CheckpointError, match="wants shape"):
        dequantised("w.weight", {"w.weight": stored, "w.scale": scale[:1]})


@pytest.mark.parametrize(
    ("drop", "add", "config", "says"),
    [
        ("mtp.1.ffn.experts.2.w3.weight", {}, {}, r"missing or extra: \[2\]"),
        ("mtp.0.main_proj.weight", {}, {}, "missing tensors"),
        (None, {"mtp.0.hc_head_fn": torch.zeros(4, 128)}, {}, "unknown tensors"),
        (None, {}, {"hc_shifted": False}, "hc_shifted"),
        (None, {}, {"num_nextn_predict_layers": 0}, "no draft layers"),
        (None, {}, {"q_lora_rank": 8}, "the config says"),
        (None, {}, {"head_dim": 24}, "multiple of 32"),
        ("embed.weight", {}, {}, r"embed\.weight"),
    ],
)
def test_failures_are_named(tmp_path, drop, add, config, says) -> None:
    tensors = {k: v for k, v in weights().items() if k != drop} | add
    write(tmp_path, tensors, {"model_type": "deepseek_v41", "text_config": TEXT | config})
    with pytest.raises(CheckpointError, match=says):
        DSparkDrafter.load(tmp_path)


def test_embedding_and_head_can_come_from_the_target(tmp_path) -> None:
    given = weights()
    embed = given.pop("embed.weight")
    write(tmp_path, given)
    out = DSparkDrafter.load(tmp_path, embed=embed).propose(batch(4), CounterRng())
    assert out.lengths.tolist() == [3]
