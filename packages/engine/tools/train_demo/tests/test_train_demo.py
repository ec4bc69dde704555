"""Claims of the demo model's training code. Run: `pytest packages/engine/tools/train_demo`."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import calibrate
import corpus
import data
import fast_ops
import twin as twin_module
from configuration import build, demo_config, initialise
from export import export
from losses import draft_loss, frozen_trunk, trunk_loss
from optim import orthogonalise
from tokenizers import Tokenizer
from tokens import VOCABULARY, special_tokens, train_tokenizer
from train import DEMO, PHASES
from twin import Ops, Pass, Twin, load_twin

from deepinfer_recipe import Tokenizer as RecipeTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    torch.set_num_threads(1)
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture
def model(tokenizer: Tokenizer) -> Twin:
    out = build(tokenizer, demo_config(tokenizer))
    initialise(out, 1)
    return out


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def test_fast_operations_give_the_logits_and_gradients_of_the_literal_ones(model: Twin) -> None:
    ids, results = some_ids(2, 96), []
    for ops in (Ops(), fast_ops.fast_ops()):
        model.ops = ops
        model.zero_grad()
        logits = model(ids, "none")
        logits.logsumexp(-1).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), grads))
    (slow, slow_grads), (fast, fast_grads) = results
    # products in bfloat16: close, save where a near-tie sends a token to another expert
    assert (slow - fast).abs().median() < 0.02 * slow.std()
    for name, grad in slow_grads.items():
        if grad.norm() > 1e-3 and "engram" not in name:  # its gate's root is not smooth at zero
            assert torch.cosine_similarity(grad.flatten(), fast_grads[name].flatten(), 0) > 0.9, (
                name
            )


def test_fast_hyper_connections_equal_the_literal_ones_to_rounding() -> None:
    if fast_ops.fast_ops().hc_mix is Ops().hc_mix:
        pytest.skip("no C++ compiler here")
    draw = torch.Generator().manual_seed(3)
    m, base, scale = (torch.randn(s, generator=draw) for s in ((37, 24), (24,), (3,)))
    S, y = torch.randn(37, 4, 48, generator=draw), torch.randn(37, 48, generator=draw)
    w = torch.rand(48, generator=draw)
    found = []
    for fast in (False, True):
        leaves = [t.clone().requires_grad_() for t in (m, base, scale, S, y, w)]
        if fast:
            pre, post, A = fast_ops._Weights.apply(*leaves[:3], 20, 1e-6)
            out = fast_ops._Expand.apply(leaves[4], leaves[3], post, A)
            x = fast_ops._CollapseNorm.apply(out, pre, leaves[5], 1e-20)
        else:
            pre, post, A = twin_module.hc_weights(*leaves[:3], 4, 20, 1e-6)
            out = twin_module.hc_expand(leaves[4], leaves[3], post, A)
            x = twin_module.hc_collapse_norm(out, pre, leaves[5], 1e-20)
        (x.sin() * torch.arange(48)).sum().backward()
        found.append([x.detach(), *(leaf.grad for leaf in leaves)])
    for slow, quick in zip(*found, strict=True):
        assert torch.allclose(slow, quick, rtol=2e-3, atol=2e-3 * float(slow.abs().max()))


def test_no_logit_depends_on_a_later_token(model: Twin) -> None:
    model.double()
    ids = some_ids(1, 160)
    changed = ids.clone()
    changed[0, 140:] = 5
    for quant in ("none", "reference"):
        with torch.no_grad():
            before, after = model(ids, quant), model(changed, quant)
        assert torch.allclose(before[:, :140], after[:, :140], rtol=0, atol=1e-12)
        assert not torch.allclose(before[:, 140:], after[:, 140:])


def test_selection_keeps_topk_entries_within_the_candidate_blocks(model: Twin) -> None:
    state = Pass("reference")
    with torch.no_grad():
        model.trunk(some_ids(1, 320), state)
    picked = state.chosen[6][0]
    assert picked.sum(-1).max() == model.cfg.index_topk
    assert state.candidates is not None
    blocks = state.candidates[0].unflatten(-1, (-1, 8)).any(-1).sum(-1)
    assert blocks.max() == model.cfg.candidate_topk_blocks
    assert not (picked & ~state.candidates[0]).any()
    assert state.candidates[0, 319, 319]  # the newest block is always kept


def test_draft_training_view_equals_the_sequential_draft(model: Twin) -> None:
    model.double()
    ids = some_ids(1, 60)
    tokens, logits, _ = model.draft(ids[:, :50], ids[:, 50])
    known = torch.cat((ids[:, :51], tokens), 1)
    base, _ = model.draft_block(model.features(known[:, :55]), known, torch.tensor([[49]]))
    bias, _ = model.markov(known[:, 50:55])
    assert torch.allclose(base[0, 0] + bias[0], logits[0], atol=1e-9)


def test_export_and_load_give_the_rounded_weights_back(
    model: Twin, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with torch.no_grad():
        for layer in [*model.layers, *model.mtp]:
            layer.attn.attn_sink.normal_()
    export(model, tokenizer, demo_config(tokenizer), tmp_path)
    loaded = load_twin(tmp_path)
    for (name, a), (_, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        exact = any(k in name for k in ("hc_", "attn_sink"))
        assert torch.equal(a if exact else a.bfloat16().float(), b), name


def test_the_rows_are_what_the_codec_renders_and_encodes(tokenizer: Tokenizer) -> None:
    codec = RecipeTokenizer(tokenizer)
    for family, text in islice(corpus.documents("codec", True, 1200, "long"), 40):
        ids, kinds = data.encode(tokenizer, text)
        assert ids == codec.encode_prompt(text.text, text.special_ranges), family
        assert ids.count(0) == 1
        assert ids[-1] == 1
        assert kinds[-1] == data.ANSWER


def test_batches_depend_on_their_key_alone(tokenizer: Tokenizer) -> None:
    a, b = (data.batch(tokenizer, "k", 2, 128, "short") for _ in range(2))
    other = data.batch(tokenizer, "l", 2, 128, "short")
    assert torch.equal(a.ids, b.ids)
    assert not torch.equal(a.ids, other.ids)


def test_no_pair_of_the_held_out_split_is_drawn_for_training() -> None:
    import random

    import words

    pairs = []
    for held_out in (False, True):
        d = corpus.Draw(random.Random(1), held_out)
        pairs.append({d.pair(words.NAMES, words.ANIMALS) for _ in range(800)})
    assert not pairs[0] & pairs[1]


def test_the_tokenizer_has_the_special_tokens_first_and_single_digits() -> None:
    texts = [
        t for _, d in islice(corpus.documents("t", False, 512, "short"), 1500) for t in [d.text]
    ]
    tokenizer = train_tokenizer(texts)
    assert [tokenizer.token_to_id(t) for t in special_tokens()] == list(
        range(len(special_tokens()))
    )
    assert len(tokenizer.encode("2024", add_special_tokens=False).ids) == 4
    odd = "naïve 你好 🙂\n\t x"
    assert tokenizer.decode(tokenizer.encode(odd, add_special_tokens=False).ids) == odd


def test_a_step_of_each_stage_lowers_its_loss(model: Twin, tokenizer: Tokenizer) -> None:
    fast_ops.speed_up(model)
    b = data.batch(tokenizer, "step", 2, 256, "short")
    with_anchors = data.batch(tokenizer, "step", 1, 512, "drill")
    for loss_of in (
        lambda: trunk_loss(model, b, PHASES[0], True, 1)[0],
        lambda: draft_loss(model, with_anchors, *frozen_trunk(model, with_anchors), 1)[0],
    ):
        params = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.Adam(params, 1e-3)
        first = loss_of()
        first.backward()
        optimiser.step()
        optimiser.zero_grad()
        assert float(loss_of().detach()) < float(first.detach())


def test_the_draft_loss_leaves_the_trunk_alone(model: Twin, tokenizer: Tokenizer) -> None:
    b = data.batch(tokenizer, "alone", 1, 256, "drill")
    draft_loss(model, b, *frozen_trunk(model, b), 1)[0].backward()
    moved = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved
    assert all(n.startswith("mtp.") for n in moved)
    assert model.head.weight.requires_grad


def test_orthogonal_updates_have_singular_values_near_one() -> None:
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 60)))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_temperatures_undo_overconfident_logits() -> None:
    draw = torch.Generator().manual_seed(0)
    true = torch.randn(4000, 3, generator=draw) + 1
    accepted = torch.rand(true.shape, generator=draw) < torch.sigmoid(true)
    for temperature in calibrate.fit(true * 2, accepted):
        assert 1.6 < temperature < 2.5
