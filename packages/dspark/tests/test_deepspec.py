"""DeepSpec checkpoints: what is saved drafts what was trained, and failures are named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from deepinfer_dspark import CheckpointError, CounterRng, DraftBatch, SamplingBatch, ShapeError

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

from deepinfer_dspark.drafters.block import DFlashDrafter, DSparkDrafter  # noqa: E402
from deepinfer_dspark.drafters.deepspec import DeepSpecConfig, DraftModule  # noqa: E402

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32, "block_size": 3,
    "target_layer_ids": [1, 2], "mask_token_id": 31, "markov_rank": 5,
    "markov_head_type": "gated", "enable_confidence_head": True,
}  # fmt: skip


def module(**changes) -> DraftModule:
    torch.manual_seed(0)
    made = DraftModule(DeepSpecConfig.from_dict(CONFIG | changes))
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made


def batch(features_rows: list[int], positions: list[int], temperature: float = 0.8) -> DraftBatch:
    n = len(positions)
    cu = np.concatenate([[0], np.cumsum(features_rows)])
    g = torch.Generator().manual_seed(4)
    return DraftBatch(
        list(range(n)), np.arange(n) + 3, np.array(positions), [[0]] * n,
        SamplingBatch.uniform(n, temperature=temperature), np.zeros(n, dtype=np.int64),
        torch.randn(int(cu[-1]), 32, generator=g), cu,
    )  # fmt: skip


def save(directory, made: DraftModule, config: dict, drop: str | None = None) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    weights = {k: v.contiguous() for k, v in made.state_dict().items() if k != drop}
    safetensors.save_file(weights, directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_saved_checkpoint_drafts_what_the_module_drafts(tmp_path, kind) -> None:
    made = module(markov_head_type=kind)
    save(tmp_path, made, CONFIG | {"markov_head_type": kind})
    a = DSparkDrafter(made).propose(batch([4, 6], [4, 6]), CounterRng())
    b = DSparkDrafter.load(tmp_path).propose(batch([4, 6], [4, 6]), CounterRng())
    assert np.array_equal(a.tokens, b.tokens)
    assert torch.equal(a.q, b.q)
    assert a.conf is not None
    assert ((a.conf > 0) & (a.conf < 1)).all()


def test_padding_of_contexts_does_not_change_a_request() -> None:
    whole = batch([2, 9], [2, 9])
    both = DSparkDrafter(module()).propose(whole, CounterRng())
    one = DraftBatch(
        [0], whole.anchors[:1], whole.positions[:1], [[0]], whole.sampling.select(np.array([0])),
        whole.rounds[:1], whole.features[:2], np.array([0, 2]),
    )  # fmt: skip
    alone = DSparkDrafter(module()).propose(one, CounterRng())
    assert torch.allclose(alone.q[0], both.q[0], atol=1e-6)


def test_context_given_at_once_or_in_two_rounds_gives_one_draft() -> None:
    whole = batch([7], [7])
    at_once = DSparkDrafter(module()).propose(whole, CounterRng())
    drafter = DSparkDrafter(module())
    first = DraftBatch(
        [0], whole.anchors, np.array([4]), [[0]], whole.sampling, whole.rounds,
        whole.features[:4], np.array([0, 4]),
    )  # fmt: skip
    drafter.propose(first, CounterRng())
    drafter.fork(0, "copy")
    second = DraftBatch(
        ["copy"], whole.anchors, np.array([7]), [[0]], whole.sampling, whole.rounds,
        whole.features[4:], np.array([0, 3]),
    )  # fmt: skip
    assert torch.allclose(drafter.propose(second, CounterRng()).q, at_once.q, atol=1e-6)


def test_a_gap_in_the_context_is_refused() -> None:
    with pytest.raises(ShapeError, match="every position below the anchor"):
        DSparkDrafter(module()).propose(batch([3], [5]), CounterRng())


def test_a_request_without_features_gets_no_drafts() -> None:
    out = DSparkDrafter(module()).propose(batch([0, 4], [0, 4]), CounterRng())
    assert out.lengths.tolist() == [0, 3]


def test_dflash_has_no_markov_head() -> None:
    plain = module(markov_rank=0, enable_confidence_head=False)
    out = DFlashDrafter(plain).propose(batch([4], [4]), CounterRng())
    assert out.conf is not None
    # the proxy is the top probability of each row's own law at temperature 1
    given = batch([4], [4])
    context = [
        tuple(t[None] for t in layer) for layer in plain.context(given.features, torch.arange(4))
    ]
    states = plain.block(torch.tensor([3]), torch.tensor([4]), context, torch.ones(1, 4).bool())
    expected = torch.softmax(states.logits[0].double(), dim=-1).amax(dim=-1)
    assert np.allclose(out.conf[0], expected.detach().numpy(), atol=1e-6)
    assert out.lengths.tolist() == [3]
    with pytest.raises(CheckpointError, match="DSparkDrafter"):
        DFlashDrafter(module())


def test_checkpoint_failures_are_named(tmp_path) -> None:
    with pytest.raises(CheckpointError, match=r"no readable config\.json"):
        DSparkDrafter.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="JSON object"):
        DSparkDrafter.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        DSparkDrafter.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        DSparkDrafter.load(tmp_path)
    save(tmp_path, module(), {k: v for k, v in CONFIG.items() if k != "block_size"})
    with pytest.raises(CheckpointError, match="block_size"):
        DSparkDrafter.load(tmp_path)
    save(tmp_path, module(), CONFIG, drop="fc.weight")
    with pytest.raises(CheckpointError, match=r"missing tensors \['fc.weight'\]"):
        DSparkDrafter.load(tmp_path)
    save(tmp_path, module(), CONFIG | {"intermediate_size": 20})
    with pytest.raises(CheckpointError, match="the config says"):
        DSparkDrafter.load(tmp_path)


def test_embedding_and_head_can_come_from_the_target(tmp_path) -> None:
    made = module()
    save(tmp_path, made, CONFIG, drop="embed_tokens.weight")
    loaded = DSparkDrafter.load(tmp_path, embed=made.embed_tokens.weight.detach())
    assert loaded.propose(batch([4], [4]), CounterRng()).lengths.tolist() == [3]
