"""What the trunk, its index and the draft module are trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import data
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from twin import Pass, Twin

from deepinfer_dspark.drafters.training import LossWeights, draft_losses

if TYPE_CHECKING:
    from train import Phase

CONTEXT_WEIGHT = 0.15  # of a token that inference is given, against 1 of one it writes
ANCHORS = 4  # one draft block for so many tokens of a row


def trunk_loss(
    twin: Twin, b: data.Batch, phase: Phase, probe: bool, step: int
) -> tuple[Tensor, Tensor, Pass, dict[str, float]]:
    """Weighted cross entropy; with `probe` also the divergence of index and attention.

    Returns the loss, the normed hidden states `[B,T,H]`, the by-products and a report.
    """
    state = Pass(phase.quant, select=phase.select)
    T = phase.length
    if probe:
        draw = torch.Generator().manual_seed(step)
        state.probe_rows = torch.randperm(T, generator=draw)[: max(16, T // 16)].sort().values
    hidden = twin.trunk(b.inputs, state)
    logits = twin.head(hidden)
    each = F.cross_entropy(logits.flatten(0, 1), b.targets.flatten(), reduction="none")
    kinds = b.target_kinds.flatten()
    answer, context = kinds == data.ANSWER, kinds == data.CONTEXT
    weight = answer + CONTEXT_WEIGHT * context
    loss = (each * weight).sum() / weight.sum()
    seen = each.detach()
    report = {"answer": float(seen[answer].mean()), "context": float(seen[context].mean())}
    if probe:
        index = torch.stack([index_loss(p) for p in state.probes.values()]).mean()
        report["index"] = float(index.detach())
        loss = loss + index
    return loss, hidden, state, report


def index_loss(probe: Any) -> Tensor:
    """KL from the attention's share of each visible entry to the softmax of the scores."""
    some = probe.mass.sum(-1) > 1e-6
    target = probe.mass[some] / probe.mass[some].sum(-1, keepdim=True)
    guess = probe.scores.masked_fill(~probe.allowed, -torch.inf)[some].log_softmax(-1)
    guess = guess.masked_fill(~probe.allowed[some], 0.0)
    return (target * ((target + 1e-9).log() - guess)).sum(-1).mean()


@torch.no_grad()
def frozen_trunk(twin: Twin, b: data.Batch) -> tuple[Tensor, Tensor]:
    """Hidden states and draft features of a trunk that does not learn."""
    seen = Pass("reference")
    hidden = twin.trunk(b.inputs, seen)
    return hidden, torch.cat(seen.features, -1)


def draft_loss(
    twin: Twin, b: data.Batch, hidden: Tensor, features: Tensor, step: int
) -> tuple[Tensor, Pass, dict[str, float]]:
    """The library's `draft_losses` of one block for every few answer tokens, rows weighted by
    exp(-k / block).

    `hidden` and `features` are without gradient; the embedding and the head that the draft
    module shares with the trunk learn nothing from this loss.
    """
    size = twin.cfg.dspark_block_size
    shared = [p for p in (twin.embed.weight, twin.head.weight) if p.requires_grad]
    for parameter in shared:
        parameter.requires_grad_(False)
    # the anchor P+1 and the first draft P+2 are tokens the model writes
    ok = (b.kinds[:, 1:-1] == data.ANSWER) & (b.kinds[:, 2:] == data.ANSWER)
    chance = ok.float() + 1e-6
    draw = torch.Generator().manual_seed(step)
    at = chance.multinomial(ok.shape[1] // ANCHORS, generator=draw).sort(-1).values
    usable = ok.gather(1, at)
    at = at.clamp_max(b.inputs.shape[1] - 1)
    state = Pass("reference")
    base, z = twin.draft_block(features, b.ids, at, "reference", state)
    k = torch.arange(size)
    T = b.inputs.shape[1]
    label_at = at.unsqueeze(-1) + 2 + k
    inside = label_at <= T
    label_at = label_at.clamp_max(T)
    previous = b.ids.gather(1, (label_at - 1).flatten(1)).view_as(label_at)
    label = b.ids.gather(1, label_at.flatten(1)).view_as(label_at)
    written = b.kinds.gather(1, label_at.flatten(1)).view_as(label_at) == data.ANSWER
    valid = (inside & written & usable.unsqueeze(-1)).cummin(-1).values
    bias, e = twin.markov(previous)
    with torch.no_grad():
        row = torch.arange(len(at)).view(-1, 1, 1)
        target = twin.head(hidden[row, label_at - 1])
    for parameter in shared:
        parameter.requires_grad_(True)
    losses = draft_losses(
        (base + bias).flatten(0, 1),
        target.flatten(0, 1),
        label.flatten(0, 1),
        valid.flatten(0, 1),
        twin.confidence(z.detach(), e.detach()).flatten(0, 1),
        LossWeights(decay_rows=size),
    )
    figures = {"ce": losses.ce, "l1": losses.l1, "accepted": losses.tau - 1}
    return losses.total, state, {name: float(value) for name, value in figures.items()}
