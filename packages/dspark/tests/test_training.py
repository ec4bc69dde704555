"""The training module: labels line up, losses are the formulas, a head really learns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepinfer_dspark import CounterRng, SamplingBatch, ShapeError

torch = pytest.importorskip("torch")

from deepinfer_dspark.drafters.heads import ConfidenceHead, MarkovHead, draft_block  # noqa: E402
from deepinfer_dspark.drafters.training import (  # noqa: E402
    LossWeights,
    Schedule,
    clip_and_step,
    cut_blocks,
    draft_losses,
    row_weights,
    sample_anchors,
)


def generator(seed: int = 0):
    return torch.Generator().manual_seed(seed)


def test_anchors_are_distinct_and_their_token_and_the_next_are_trained_on() -> None:
    mask = torch.rand(6, 50, generator=generator()) < 0.6
    sequence, anchor = sample_anchors(mask, 8, generator(1))
    pairs = list(zip(sequence.tolist(), anchor.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert all(bool(mask[s, a]) and bool(mask[s, a + 1]) for s, a in pairs)
    assert torch.bincount(sequence).max() <= 8
    again = sample_anchors(mask, 8, generator(1))
    assert torch.equal(again[1], anchor)


def test_labels_inputs_and_sources_of_a_block_line_up() -> None:
    tokens = torch.arange(100, 110)[None]
    mask = torch.ones(1, 10, dtype=torch.bool)
    mask[0, 7] = False
    blocks = cut_blocks(tokens, mask, torch.tensor([0, 0]), torch.tensor([4, 8]), 3)
    assert blocks.labels.tolist() == [[105, 106, 0], [109, 0, 0]]
    assert blocks.valid.tolist() == [[True, True, False], [True, False, False]]
    assert blocks.previous[0].tolist() == [104, 105, 106]
    assert blocks.source[0].tolist() == [4, 5, 6]


def test_losses_are_the_written_formulas() -> None:
    g = generator(2)
    N, gamma, V = 4, 3, 5
    draft, target = (torch.randn(N, gamma, V, generator=g) for _ in range(2))
    labels = torch.randint(0, V, (N, gamma), generator=g)
    conf = torch.randn(N, gamma, generator=g)
    valid = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    weights = LossWeights(0.2, 0.5, 2.0, 3.0)
    got = draft_losses(draft, target, labels, valid, conf, weights)
    ce = l1 = bce = mass = 0.0
    for i in range(N):
        for k in range(gamma):
            if not valid[i, k]:
                continue
            w = math.exp(-k / 3.0)
            q, p = torch.softmax(draft[i, k], 0), torch.softmax(target[i, k], 0)
            distance = float((q - p).abs().sum())
            c, soft = float(torch.sigmoid(conf[i, k])), 1 - 0.5 * distance
            ce += w * -math.log(float(q[labels[i, k]]))
            l1 += w * distance
            bce += w * -(soft * math.log(c) + (1 - soft) * math.log(1 - c))
            mass += w
    assert float(got.ce) == pytest.approx(ce / mass, rel=1e-5)
    assert float(got.l1) == pytest.approx(l1 / mass, rel=1e-5)
    assert float(got.bce) == pytest.approx(bce / mass, rel=1e-5)
    total = (0.2 * ce + 0.5 * l1 + 2.0 * bce) / mass
    assert float(got.total.detach()) == pytest.approx(total, rel=1e-5)
    assert row_weights(valid, 3.0)[0].tolist() == pytest.approx(
        [math.exp(-k / 3) for k in range(3)]
    )


def test_two_ranks_with_a_global_mean_give_the_gradient_of_one() -> None:
    g = generator(3)
    draft = torch.randn(6, 2, 4, generator=g, requires_grad=True)
    target = torch.randn(6, 2, 4, generator=g)
    labels = torch.randint(0, 4, (6, 2), generator=g)
    valid = torch.rand(6, 2, generator=g) < 0.7
    draft_losses(draft, target, labels, valid).total.backward()
    whole = draft.grad.clone()
    draft.grad = None
    mass = row_weights(valid, 4.0).sum()
    for part in (slice(0, 2), slice(2, 6)):
        draft_losses(
            draft[part], target[part], labels[part], valid[part], reduce_sum=lambda _: mass
        ).total.backward()
    assert torch.allclose(draft.grad, whole, atol=1e-6)


def test_tau_counts_the_bonus_and_stops_at_invalid_rows() -> None:
    logits = torch.zeros(1, 3, 4)
    valid = torch.tensor([[True, True, False]])
    got = draft_losses(logits, logits, torch.zeros(1, 3, dtype=torch.long), valid)
    assert float(got.tau) == pytest.approx(3.0)
    assert math.isnan(float(got.acceptance[2]))


def test_a_batch_without_valid_rows_gives_zero_and_no_nan_gradient() -> None:
    draft = torch.randn(2, 2, 3, requires_grad=True)
    labels = torch.zeros(2, 2, dtype=torch.long)
    got = draft_losses(draft, torch.randn(2, 2, 3), labels, torch.zeros(2, 2, dtype=torch.bool))
    got.total.backward()
    assert float(got.total.detach()) == 0.0
    assert torch.equal(draft.grad, torch.zeros_like(draft))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_stepped_equals_itself_teacher_forced(kind) -> None:
    torch.manual_seed(0)
    head = MarkovHead(11, 4, kind, 6)
    torch.nn.init.normal_(head.markov_w2.weight)
    previous, hidden = torch.randint(0, 11, (3, 5)), torch.randn(3, 5, 6)
    bias, e = head(previous, hidden)
    state = None
    for k in range(5):
        step, e_k, state = head.step(previous[:, k], hidden[:, k], state)
        assert torch.allclose(step, bias[:, k], atol=1e-6)
        assert torch.allclose(e_k, e[:, k])


def test_training_a_markov_head_learns_a_markov_chain_and_its_confidence() -> None:
    """The base logits know nothing; the target is a chain: only the head can explain it."""
    torch.manual_seed(1)
    V, gamma = 8, 4
    chain = torch.randn(V, V) * 2
    head, confidence = MarkovHead(V, 6), ConfidenceHead(3, 6, bias=True)
    optimizer = torch.optim.Adam([*head.parameters(), *confidence.parameters()], lr=1e-2)
    schedule = Schedule(peak=2e-2, total_steps=250)
    taus = []
    for step in range(250):
        start = torch.randint(0, V, (64,))
        tokens = [start]
        for _ in range(gamma):
            tokens.append(torch.multinomial(torch.softmax(chain[tokens[-1]], -1), 1)[:, 0])
        previous, labels = torch.stack(tokens[:-1], 1), torch.stack(tokens[1:], 1)
        hidden = torch.zeros(64, gamma, 3)
        bias, e = head(previous, hidden)
        valid = torch.ones(64, gamma, dtype=torch.bool)
        losses = draft_losses(bias, chain[previous], labels, valid, confidence(hidden, e))
        losses.total.backward()
        clip_and_step(optimizer, schedule, step)
        taus.append(float(losses.tau))
    assert taus[0] < 3.0
    assert taus[-1] > 4.0


def test_drafted_tokens_follow_their_law_and_confidence_does_not_see_its_own_draft() -> None:
    torch.manual_seed(2)
    R, gamma, V, d = 5, 3, 7, 4
    head, confidence = MarkovHead(V, 3), ConfidenceHead(d, 3, bias=False)
    torch.nn.init.normal_(head.markov_w2.weight)
    base, hidden = torch.randn(R, gamma, V), torch.randn(R, gamma, d)
    anchors = torch.arange(R)

    def run(seed: int):
        params = SamplingBatch.uniform(R, seeds=np.arange(R, dtype=np.uint64) + seed)
        with torch.no_grad():
            return draft_block(
                base, hidden, hidden, anchors, head, confidence, params,
                np.zeros(R, dtype=np.int64), CounterRng(),
            )  # fmt: skip

    a = run(0)
    for k in range(gamma):
        before = anchors if k == 0 else torch.from_numpy(a.tokens[:, k - 1])
        with torch.no_grad():
            law = torch.softmax(
                (base[:, k] + head.step(before, hidden[:, k], None)[0]).double(), -1
            )
        assert np.allclose(a.q[:, k].numpy(), law.numpy(), atol=1e-6)
    runs = [run(s) for s in range(0, 500, 50)]
    assert len({r.tokens[0, 0] for r in runs}) > 1
    assert len({r.conf[0, 0] for r in runs}) == 1  # c_1 is the same whatever x_1 was drawn


def test_greedy_blocks_are_point_masses() -> None:
    out = draft_block(
        torch.randn(2, 3, 5), torch.zeros(2, 3, 1), torch.zeros(2, 3, 1), torch.zeros(2).long(),
        None, None, SamplingBatch.greedy(2), np.zeros(2, dtype=np.int64), CounterRng(),
    )  # fmt: skip
    assert out.q is None
    assert out.conf is None


def test_the_schedule_warms_up_and_decays() -> None:
    made = Schedule(peak=1.0, total_steps=100, warmup_fraction=0.1, floor=0.2)
    assert made.lr(0) == pytest.approx(0.1)
    assert made.lr(9) == pytest.approx(1.0)
    assert made.lr(99) == pytest.approx(0.2, abs=0.01)
    assert Schedule(peak=1.0, total_steps=100, decay=False).lr(99) == 1.0


def test_shapes_are_checked() -> None:
    with pytest.raises(ShapeError, match="draft_losses"):
        draft_losses(
            torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), torch.zeros(1, 2).long(),
            torch.ones(1, 2).bool(),
        )  # fmt: skip
    with pytest.raises(ShapeError, match="loss_mask"):
        sample_anchors(torch.ones(4, dtype=torch.bool), 2, generator())


def test_v41_head_tensors_load_under_their_checkpoint_names() -> None:
    from deepinfer_dspark import CheckpointError
    from deepinfer_dspark.drafters.heads import load_v41_heads

    g = generator(5)
    weights = {
        "mtp.2.markov_head.embed.weight": torch.randn(9, 4, generator=g),
        "mtp.2.markov_head.head.weight": torch.randn(9, 4, generator=g),
        "mtp.2.confidence_head.proj.weight": torch.randn(1, 10, generator=g),
        "mtp.2.norm.weight": torch.ones(6),
    }
    markov, confidence = load_v41_heads(weights)
    previous, z = torch.tensor([3, 8]), torch.randn(2, 6, generator=g)
    bias, e, _ = markov.step(previous, z, None)
    embedded = weights["mtp.2.markov_head.embed.weight"][previous]
    assert torch.allclose(bias, embedded @ weights["mtp.2.markov_head.head.weight"].T, atol=1e-6)
    proj = weights["mtp.2.confidence_head.proj.weight"][0]
    assert torch.allclose(confidence(z, e), torch.cat([z, embedded], -1) @ proj, atol=1e-6)
    del weights["mtp.2.markov_head.head.weight"]
    with pytest.raises(CheckpointError, match=r"markov_head\.head\.weight"):
        load_v41_heads(weights)
