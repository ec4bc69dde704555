"""Drafters for Qwen3 from checkpoints in their public layouts, with random weights.

The target is transformers' own Qwen3, and so are the layers that the DSpark module is held to.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")

from deepinfer_dspark import (  # noqa: E402
    CounterRng,
    DraftBatch,
    DraftModelTree,
    SamplingBatch,
    SpecLoop,
    TreeLoop,
    TreeShape,
)
from deepinfer_dspark.drafters.block import DSparkDrafter  # noqa: E402
from deepinfer_dspark.drafters.eagle import (  # noqa: E402
    EagleConfig,
    EagleDrafter,
    EagleModule,
)
from deepinfer_dspark.hf import HFCausal, HFTarget, HFTreeTarget  # noqa: E402

VOCAB, HIDDEN = 48, 16
LAYERS = (1, 2, 3)
PROMPTS = [[5, 6, 7, 5, 6], [9, 2], list(range(3, 20))]


def qwen3(**changes):
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=24, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.4,
        max_position_embeddings=256, eos_token_id=None, pad_token_id=0, rope_theta=1_000_000.0,
        **changes,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.Qwen3ForCausalLM(config).double().eval()


def plain(model, prompt, new: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def eagle3(folder) -> None:
    """An EAGLE-3 head as SpecForge writes it: no embedding, its own vocabulary, d2t and t2d."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1_000_000,
        "draft_vocab_size": 20, "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)},
    }  # fmt: skip
    torch.manual_seed(4)
    module = EagleModule(EagleConfig.from_dict(config)).double()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids = torch.arange(0, 40, 2)
    weights = {k: v.contiguous() for k, v in module.state_dict().items()}
    weights |= {"d2t": ids - torch.arange(20), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    del weights["embed_tokens.weight"]
    safetensors.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def dspark_weights() -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and tensors of a DSpark draft model for Qwen3, named as in its checkpoints."""
    config = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "block_size": 4,
        "target_layer_ids": list(LAYERS), "mask_token_id": VOCAB - 1, "markov_rank": 5,
        "markov_head_type": "vanilla", "enable_confidence_head": True, "rope_theta": 1_000_000.0,
    }  # fmt: skip
    g = torch.Generator().manual_seed(6)
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,),
              "norm.weight": (HIDDEN,)}  # fmt: skip
    for i in range(2):
        layer = {
            "self_attn.q_proj": (32, HIDDEN), "self_attn.k_proj": (16, HIDDEN),
            "self_attn.v_proj": (16, HIDDEN), "self_attn.o_proj": (HIDDEN, 32),
            "self_attn.q_norm": (8,), "self_attn.k_norm": (8,),
            "mlp.gate_proj": (24, HIDDEN), "mlp.up_proj": (24, HIDDEN),
            "mlp.down_proj": (HIDDEN, 24), "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    weights = {
        name: torch.randn(shape, generator=g, dtype=torch.float64) * 0.4
        for name, shape in shapes.items()
    }
    return config, weights


def dspark(folder) -> None:
    """The heads' tensors are named by the module itself; embedding and LM head are the target's."""
    from deepinfer_dspark.drafters.deepspec import DeepSpecConfig, DraftModule

    config, weights = dspark_weights()
    made = DraftModule(DeepSpecConfig.from_dict(config)).double().state_dict()
    g = torch.Generator().manual_seed(7)
    for name, tensor in made.items():
        if name.startswith(("markov_head", "confidence_head")):
            weights[name] = torch.randn(tensor.shape, generator=g, dtype=torch.float64) * 0.3
    safetensors.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def load_dspark(folder, target) -> DSparkDrafter:
    return DSparkDrafter.load(
        folder,
        embed=target.get_input_embeddings().weight.detach(),
        lm_head=target.get_output_embeddings().weight.detach(),
    )


def load_eagle(folder, target, shape=None) -> EagleDrafter:
    embed = target.get_input_embeddings().weight.detach()
    return EagleDrafter.load(folder, max_tokens=4, embed=embed, shape=shape)


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_greedy_text_with_a_loaded_drafter_is_that_of_generate(tmp_path, kind: str) -> None:
    target = qwen3()
    (eagle3 if kind == "eagle3" else dspark)(tmp_path)
    drafter = (load_eagle if kind == "eagle3" else load_dspark)(tmp_path, target)
    made = SpecLoop(drafter, HFTarget(target, LAYERS)).generate(
        PROMPTS, SamplingBatch.greedy(3), 16
    )
    assert made.tokens == [plain(target, p, 16) for p in PROMPTS]
    assert made.verified > 0


@pytest.mark.parametrize("kind", ["eagle3", "model", "model, drawn"])
def test_greedy_text_through_trees_is_that_of_generate(tmp_path, kind: str) -> None:
    target = qwen3()
    eagle3(tmp_path)
    shape = TreeShape(3, 2, 8)
    for prompt in PROMPTS:
        if kind == "eagle3":
            drafter = load_eagle(tmp_path, target, shape)
        else:
            drafter = DraftModelTree(HFCausal(target), shape, drawn="drawn" in kind)
        made = TreeLoop(drafter, HFTreeTarget(target, LAYERS)).generate(
            prompt, SamplingBatch.greedy(1), 16
        )
        assert made.tokens == plain(target, prompt, 16)
        assert made.drafted > 0
        if kind != "eagle3":  # the target drafts for itself: each round but the last gains four
            assert made.rounds == 4


def test_entries_kept_of_a_tree_equal_a_fresh_prefill() -> None:
    target = qwen3()
    tree = HFTreeTarget(target, LAYERS)
    state, _ = tree.start([5, 6, 7])
    visible = np.tril(np.ones((4, 4), dtype=bool))
    visible[2, 1] = visible[3, 1] = False  # two branches behind the anchor, one two deep
    tree.forward(np.array([7, 9, 4, 8]), np.array([2, 3, 3, 4]), visible, state)
    tree.keep(state, np.array([0, 2, 3]))
    after = tree.forward(np.array([1]), np.array([5]), np.ones((1, 1), dtype=bool), state)
    fresh, _ = tree.start([5, 6, 7, 4, 8, 1])
    want = tree.forward(np.array([1]), np.array([5]), np.ones((1, 1), dtype=bool), fresh)
    assert torch.allclose(after.logits, want.logits, atol=1e-12)
    assert torch.allclose(after.features, want.features, atol=1e-12)


def test_a_dspark_module_equals_the_layers_of_transformers(tmp_path) -> None:
    """Distributions and confidences of a block; attention, norms and MLP from Qwen3's own parts."""
    from transformers.models.qwen3 import modeling_qwen3 as parts

    target, (config, weights) = qwen3(), dspark_weights()
    dspark(tmp_path)
    drafter = load_dspark(tmp_path, target)
    n, anchor = 6, 11
    g = torch.Generator().manual_seed(9)
    features = torch.randn(n, 3 * HIDDEN, generator=g, dtype=torch.float64)
    own = transformers.Qwen3Config(
        **{k: v for k, v in config.items() if k in ("hidden_size", "intermediate_size", "head_dim",
           "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_theta")}
    )  # fmt: skip
    rotary = parts.Qwen3RotaryEmbedding(own)

    def norm(x, name):
        made = parts.Qwen3RMSNorm(x.shape[-1], eps=1e-6).double()
        made.weight.data = weights[name]
        return made(x)

    def heads(x, i, name, at):
        """[1, heads, n, d] of a projection; keys and queries normalised and turned."""
        y = (x @ weights[f"layers.{i}.self_attn.{name}_proj.weight"].T).view(1, len(x), -1, 8)
        if name != "v":
            y = norm(y, f"layers.{i}.self_attn.{name}_norm.weight")
        y = y.transpose(1, 2)
        if name == "v":
            return y
        cos, sin = rotary(y, at[None])
        return parts.apply_rotary_pos_emb(y, y, cos, sin)[0]

    context = norm(features @ weights["fc.weight"].T, "hidden_norm.weight")
    embed = target.get_input_embeddings().weight.detach()
    ids = torch.tensor([anchor, *[VOCAB - 1] * 3])
    x, before, at = embed[ids], torch.arange(n), torch.arange(n, n + 4)
    for i in range(2):
        inner = norm(x, f"layers.{i}.input_layernorm.weight")
        keys, values = (
            torch.cat([heads(context, i, name, before), heads(inner, i, name, at)], dim=2)
            for name in ("k", "v")
        )
        q = heads(inner, i, "q", at)
        keys, values = (t.repeat_interleave(2, dim=1) for t in (keys, values))
        score = torch.softmax(q @ keys.transpose(2, 3) / 8**0.5, dim=-1)
        joined = (score @ values).transpose(1, 2).reshape(4, -1)
        x = x + joined @ weights[f"layers.{i}.self_attn.o_proj.weight"].T
        mlp = parts.Qwen3MLP(own).double()
        mlp.load_state_dict(
            {k.split("mlp.")[1]: v for k, v in weights.items() if k.startswith(f"layers.{i}.mlp")}
        )
        x = x + mlp(norm(x, f"layers.{i}.post_attention_layernorm.weight"))
    hidden = norm(x, "norm.weight")
    logits = hidden @ target.get_output_embeddings().weight.detach().T

    batch = DraftBatch(
        [0], np.array([anchor]), np.array([n]), [[0] * n + [anchor]],
        SamplingBatch.uniform(1, temperature=1.0), np.array([0]), features, np.array([0, n]),
    )  # fmt: skip
    made = drafter.propose(batch, CounterRng())
    heads_of = safetensors.load_file(tmp_path / "model.safetensors")
    previous, w = anchor, heads_of["confidence_head.proj.weight"][0]
    for k in range(4):  # row k with the bias of the token before gives draft k + 1
        e = heads_of["markov_head.markov_w1.weight"][previous]
        law = torch.softmax(logits[k] + heads_of["markov_head.markov_w2.weight"] @ e, dim=-1)
        # norms and angles are computed in float32 on both sides
        assert np.allclose(made.q[0, k].numpy(), law.detach().numpy(), atol=1e-5)
        z = torch.cat([hidden[k], e]) @ w + heads_of["confidence_head.proj.bias"][0]
        assert made.conf is not None
        assert abs(made.conf[0, k] - float(torch.sigmoid(z.detach()))) < 1e-5
        previous = int(made.tokens[0, k])
