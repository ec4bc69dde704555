"""EAGLE chains: the drafter with its cache equals a plain recomputation of every step."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from deepinfer_dspark import (
    CheckpointError,
    CounterRng,
    DraftBatch,
    SamplingBatch,
    ShapeError,
    TreeShape,
)
from deepinfer_dspark.loop import SpecLoop

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from deepinfer_dspark.drafters.eagle import EagleConfig, EagleDrafter, EagleModule  # noqa: E402


def load(name: str):
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


toy = load("toymodel")
CONFIG = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 12,
}  # fmt: skip


def head(**changes) -> EagleModule:
    torch.manual_seed(1)
    made = EagleModule(EagleConfig.from_dict(CONFIG | changes)).double()
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return made


def norm(x, layer):
    return [
        v / math.sqrt(sum(u * u for u in x) / len(x) + 1e-6) * w
        for v, w in zip(x, layer.weight.tolist(), strict=True)
    ]


def plain_step(m: EagleModule, tokens: list[int], features: list[list[float]]) -> list[float]:
    """The feature after the last pair, everything from scratch, one row and head at a time."""
    c, layer = m.c, m.midlayer

    def times(linear, x):
        return (linear.weight @ torch.tensor(x, dtype=torch.float64)).tolist()

    def turned(v, position):
        half, out = len(v) // 2, [0.0] * len(v)
        for i in range(half):
            # the module computes its angles in float32
            angle = float(
                torch.tensor(float(position)) * c.rope_theta ** (-torch.arange(half) / half)[i]
            )
            a, b = v[i], v[half + i]
            cos = float(torch.tensor(angle, dtype=torch.float32).cos())
            sin = float(torch.tensor(angle, dtype=torch.float32).sin())
            out[i], out[half + i] = a * cos - b * sin, b * cos + a * sin
        return out

    rows = []
    for token, feature in zip(tokens, features, strict=True):
        embedded = norm(m.embed_tokens.weight[token].tolist(), layer.input_layernorm)
        rows.append(embedded + norm(feature, layer.hidden_norm))
    d, last = c.head_dim, len(rows) - 1
    keys, values = [], []
    for t, x in enumerate(rows):
        k, v = times(layer.self_attn.k_proj, x), times(layer.self_attn.v_proj, x)
        keys.append([turned(k[i : i + d], t) for i in range(0, len(k), d)])
        values.append([v[i : i + d] for i in range(0, len(v), d)])
    q = times(layer.self_attn.q_proj, rows[-1])
    joined = []
    for h in range(c.num_attention_heads):
        own = turned(q[h * d : (h + 1) * d], last)
        shared = h // (c.num_attention_heads // c.num_key_value_heads)
        score = [
            sum(a * b for a, b in zip(own, k[shared], strict=True)) / math.sqrt(d) for k in keys
        ]
        weight = [math.exp(s - max(score)) for s in score]
        joined += [
            sum(w * v[shared][i] for w, v in zip(weight, values, strict=True)) / sum(weight)
            for i in range(d)
        ]
    x = [a + b for a, b in zip(features[-1], times(layer.self_attn.o_proj, joined), strict=True)]
    inner = norm(x, layer.post_attention_layernorm)
    gate, up = times(layer.mlp.gate_proj, inner), times(layer.mlp.up_proj, inner)
    hidden = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    return [a + b for a, b in zip(x, times(layer.mlp.down_proj, hidden), strict=True)]


def plain_chain(m: EagleModule, history: list[int], raw, gamma: int):
    """Greedy tokens and the laws they come from."""
    features = [m.fc(row).tolist() for row in raw]
    tokens, drafts, laws = history[1:], [], []
    for _ in range(gamma):
        feature = plain_step(m, tokens, features)
        logits = m.logits(torch.tensor([feature], dtype=torch.float64))[0]
        laws.append(torch.softmax(logits.double(), -1).detach().numpy())
        drafts.append(int(logits.argmax()))
        tokens = [*tokens, drafts[-1]]
        features = [*features, feature]
    return drafts, np.array(laws)


def batch(histories, given, features, ids=None, temperature=0.0) -> DraftBatch:
    n = len(histories)
    return DraftBatch(
        list(range(n)) if ids is None else ids,
        np.array([h[-1] for h in histories]),
        np.array([len(h) - 1 for h in histories]),
        histories,
        SamplingBatch.uniform(n, temperature=temperature),
        np.zeros(n, dtype=np.int64),
        features,
        np.concatenate([[0], np.cumsum(given)]),
    )


def test_a_chain_equals_a_plain_recomputation_of_every_step() -> None:
    m = head()
    raw = torch.randn(9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    histories = [[3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2]]
    out = EagleDrafter(m, 4).propose(batch(histories, [5, 4], raw), CounterRng())
    for r, rows in enumerate((raw[:5], raw[5:])):
        drafts, laws = plain_chain(m, histories[r], rows, 4)
        assert out.tokens[r].tolist() == drafts
        assert out.conf is not None
        assert np.allclose(out.conf[r], laws.max(axis=1), atol=1e-6)
    sampled = EagleDrafter(m, 1).propose(
        batch(histories, [5, 4], raw, temperature=1.0), CounterRng()
    )
    assert np.allclose(sampled.q[1, 0].numpy(), plain_chain(m, histories[1], raw[5:], 1)[1][0],
                       atol=1e-6)  # fmt: skip


def test_every_branch_of_a_tree_equals_a_plain_recomputation() -> None:
    m = head()
    raw = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    history, shape = [3, 1, 4, 1, 5, 9], TreeShape(depth=3, branches=3, nodes=12)
    drafter = EagleDrafter(m, shape=shape)
    tree = drafter.propose_tree(batch([history], [5], raw), CounterRng())
    start = [m.fc(row).tolist() for row in raw]

    def law(path: tuple[int, ...]) -> np.ndarray:
        tokens, features = history[1:], list(start)
        for token in path:
            features, tokens = [*features, plain_step(m, tokens, features)], [*tokens, token]
        feature = torch.tensor([plain_step(m, tokens, features)], dtype=torch.float64)
        return torch.softmax(m.logits(feature)[0].double(), -1).detach().numpy()

    # the same search over plain recomputations: three likeliest a node, three nodes a level
    alive = {(): 1.0}
    level: list[tuple[int, ...]] = [()]
    for _ in range(shape.depth):
        children = {}
        for path in level:
            p = law(path)
            children |= {(*path, int(t)): alive[path] * p[t] for t in np.argsort(-p)[:3]}
        alive |= children
        level = sorted(children, key=lambda path: -alive[path])[:3]
    del alive[()]
    want = set(sorted(alive, key=lambda path: -alive[path])[: shape.nodes])
    paths = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    assert set(paths[1:]) == want
    assert tree.q is None
    # the entries of guessed tokens are gone: the next round continues from true ones
    more = torch.randn(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    text = [*history, 2, 6]
    chain = drafter.propose(batch([text], [2], more), CounterRng())
    assert chain.tokens[0].tolist() == plain_chain(m, text, torch.cat([raw, more]), 5)[0]


def test_context_in_two_rounds_replaces_what_was_guessed_between_them() -> None:
    m = head()
    raw = torch.randn(7, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    drafter = EagleDrafter(m, 3)
    drafter.propose(batch([text[:5]], [4], raw[:4]), CounterRng())
    drafter.fork(0, "copy")
    drafter.reset(0)
    again = drafter.propose(batch([text], [3], raw[4:], ["copy"]), CounterRng())
    assert again.tokens[0].tolist() == plain_chain(m, text, raw, 3)[0]
    assert drafter.propose(batch([[5]], [0], raw[:0]), CounterRng()).lengths.tolist() == [0]


def test_a_head_with_a_vocabulary_of_its_own_drafts_target_ids(tmp_path) -> None:
    m = head(draft_vocab_size=5)
    ids = torch.tensor([1, 2, 5, 7, 11])
    m.get_buffer("d2t").copy_(ids - torch.arange(5))
    weights = {k: v.contiguous() for k, v in m.state_dict().items()} | {
        "t2d": torch.zeros(12, dtype=torch.bool)
    }
    embed = weights.pop("embed_tokens.weight")
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"draft_vocab_size": 5}))
    raw = torch.randn(4, 24, dtype=torch.float64)
    loaded = EagleDrafter.load(tmp_path, max_tokens=3, embed=embed)
    given = batch([[3, 1, 4, 1, 5]], [4], raw, temperature=1.0)
    out = loaded.propose(given, CounterRng())
    assert set(out.tokens[0].tolist()) <= set(ids.tolist())
    assert np.array_equal(out.tokens, EagleDrafter(m, 3).propose(given, CounterRng()).tokens)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight"):
        EagleDrafter.load(tmp_path)
    weights["d2t"] = torch.zeros(5, dtype=torch.int64) - 1
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="distinct target tokens"):
        EagleDrafter.load(tmp_path, embed=embed)


def public_layouts():
    """config.json, names of tensors and file of heads as they are published for Qwen3."""
    flat = {k: v for k, v in CONFIG.items() if k != "draft_vocab_size"}
    scaled = {"rope_scaling": None, "rope_theta": 1_000_000, "draft_vocab_size": 5}
    aux = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    return {
        "one file of tensors": (flat | scaled, "midlayer.", "pytorch_model.bin"),
        "SpecForge": (
            flat | scaled | aux | {"architectures": ["LlamaForCausalLMEagle3"]},
            "midlayer.", "model.safetensors",
        ),
        "speculators": (
            {"speculators_model_type": "eagle3", "draft_vocab_size": 5,
             "transformer_layer_config": flat | new},
            "layers.0.", "model.safetensors",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", public_layouts())
def test_heads_load_from_the_layouts_they_are_published_in(tmp_path, name: str) -> None:
    config, layer, file = public_layouts()[name]
    m = head(draft_vocab_size=5, rope_theta=1_000_000.0)
    m.get_buffer("d2t").copy_(torch.tensor([1, 2, 5, 7, 11]) - torch.arange(5))
    weights = {k.replace("midlayer.", layer): v.contiguous() for k, v in m.state_dict().items()}
    weights["t2d"] = torch.zeros(12, dtype=torch.bool)
    embed = weights.pop("embed_tokens.weight")
    if file.endswith(".bin"):
        torch.save(weights, tmp_path / file)
    else:
        safetensors.save_file(weights, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw = torch.randn(4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    given = batch([[3, 1, 4, 1, 5]], [4], raw, temperature=1.0)
    out = EagleDrafter.load(tmp_path, max_tokens=3, embed=embed).propose(given, CounterRng())
    want = EagleDrafter(m, 3).propose(given, CounterRng())
    assert np.array_equal(out.tokens, want.tokens)
    assert torch.equal(out.q, want.q)


def test_files_that_run_code_and_scaled_rotations_are_refused(tmp_path) -> None:
    class Evil:
        def __reduce__(self):
            return (print, ("run",))

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a file of tensors"):
        EagleDrafter.load(tmp_path)
    for scaled in ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
                   {"rope_parameters": {"rope_type": "linear"}}):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | scaled))
        with pytest.raises(CheckpointError, match="rotary"):
            EagleDrafter.load(tmp_path)


def test_greedy_text_with_an_eagle_chain_is_that_of_plain_decoding() -> None:
    model = toy.ToyModel()

    class Target(toy.ToyTarget):
        def start(self, prompts):
            state, features = super().start(prompts)
            return state, torch.from_numpy(features)

    prompts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    made = SpecLoop(EagleDrafter(head(), 3), Target(model)).generate(
        prompts, SamplingBatch.greedy(3), 12
    )
    assert made.tokens == [toy.plain(model, p, 12) for p in prompts]
    assert made.verified > 0


def test_misuse_is_named() -> None:
    with pytest.raises(ShapeError, match="max_tokens"):
        EagleDrafter(head(), 0)
    with pytest.raises(ShapeError, match="every position below the anchor"):
        EagleDrafter(head()).propose(
            batch([[1, 2, 3]], [1], torch.zeros(1, 24, dtype=torch.float64)), CounterRng()
        )
    with pytest.raises(CheckpointError, match="intermediate_size"):
        EagleConfig.from_dict({k: v for k, v in CONFIG.items() if k != "intermediate_size"})
