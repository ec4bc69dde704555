"""Losses, anchors and schedule for training a draft module (needs the `torch` extra).

One training example is an *anchor* position t of a sequence. Row k (from 0) of its draft block
predicts token t + k + 1, so its label is that token and the target's law for it comes from the
target's logits at position t + k. The previous tokens that the Markov head sees are the true ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.torch_extra import Tensor, functional, torch


@dataclass(frozen=True, slots=True)
class LossWeights:
    """total = ce * CE + l1 * L1 + confidence * BCE, row k weighted by exp(-k / decay_rows)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay_rows: float = 4.0


@dataclass(frozen=True, slots=True)
class DraftLosses:
    """What one batch gives; `total` carries the gradient, everything else is detached.

    total, ce, l1, bce: scalars, weighted means over valid rows.
    acceptance: float [gamma]; mean of 1 - L1/2 of each row, the chance that its draft is accepted
                given that the earlier ones are (temperature 1). NaN where no row is valid.
    tau:        scalar; expected tokens a round, 1 + sum_k prod_{i<=k} acceptance_i, averaged over
                anchors, rows behind an invalid one counting as rejected.
    """

    total: Tensor
    ce: Tensor
    l1: Tensor
    bce: Tensor
    acceptance: Tensor
    tau: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Training rows cut from a batch of sequences; N anchors over all sequences.

    sequence: int64 [N]; index of the sequence each anchor lies in.
    anchor:   int64 [N]; its position.
    labels:   int64 [N, gamma]; token at anchor + k + 1 (0 where invalid).
    previous: int64 [N, gamma]; token at anchor + k: what the Markov head is fed.
    source:   int64 [N, gamma]; position whose target logits predict the label (clamped).
    valid:    bool [N, gamma]; the label is inside the sequence and the loss mask without a gap.
    """

    sequence: Tensor
    anchor: Tensor
    labels: Tensor
    previous: Tensor
    source: Tensor
    valid: Tensor


def sample_anchors(
    loss_mask: Tensor, per_sequence: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random anchors whose own token and whose next token are both in the loss mask.

    loss_mask: bool [batch, length]. Returns (sequence int64 [N], anchor int64 [N]), at most
    `per_sequence` distinct anchors a sequence, in order of sequence and position.
    """
    if loss_mask.dim() != 2:
        raise ShapeError(f"loss_mask wants shape [batch, length], got {tuple(loss_mask.shape)}")
    allowed = loss_mask[:, :-1] & loss_mask[:, 1:]
    keys = torch.rand(allowed.shape, generator=generator, device=generator.device)
    keys = keys.to(allowed.device).masked_fill(~allowed, -1.0)
    top = keys.topk(min(per_sequence, allowed.shape[1]), dim=1)
    chosen = torch.zeros_like(allowed).scatter_(1, top.indices, top.values >= 0)
    sequence, anchor = chosen.nonzero(as_tuple=True)
    return sequence, anchor


def cut_blocks(
    tokens: Tensor, loss_mask: Tensor, sequence: Tensor, anchor: Tensor, gamma: int
) -> Blocks:
    """Labels, Markov inputs and validity for the draft blocks of the given anchors.

    tokens: int64 [batch, length]; loss_mask: bool [batch, length]; sequence, anchor: int64 [N].
    """
    length = tokens.shape[1]
    at = anchor[:, None] + torch.arange(gamma + 1, device=tokens.device)[None, :]
    inside = at < length
    clamped = at.clamp(max=length - 1)
    ids = tokens[sequence[:, None], clamped]
    masked = loss_mask[sequence[:, None], clamped] & inside
    valid = masked[:, 1:].to(torch.int64).cumprod(dim=1).bool()
    return Blocks(
        sequence=sequence,
        anchor=anchor,
        labels=ids[:, 1:].masked_fill(~valid, 0),
        previous=ids[:, :-1],
        source=clamped[:, :-1],
        valid=valid,
    )


def row_weights(valid: Tensor, decay_rows: float) -> Tensor:
    """exp(-k / decay_rows) on valid rows, 0 elsewhere. valid: bool [N, gamma] -> float32."""
    k = torch.arange(valid.shape[1], device=valid.device, dtype=torch.float32)
    return torch.exp(-k / decay_rows)[None, :] * valid


def draft_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    labels: Tensor,
    valid: Tensor,
    confidence_logits: Tensor | None = None,
    weights: LossWeights | None = None,
    *,
    reduce_sum: Callable[[Tensor], Tensor] | None = None,
) -> DraftLosses:
    """The three losses of a batch of draft blocks.

    draft_logits:  [N, gamma, V], Markov bias included.
    target_logits: [N, gamma, V], of the frozen target at `Blocks.source`; no gradient flows in.
    labels, valid: int64 and bool [N, gamma].
    confidence_logits: [N, gamma] before the sigmoid, or None to leave that loss out. Its soft
                   label is 1 - L1/2, the true acceptance rate, detached.
    reduce_sum:    sums a tensor over data-parallel ranks: the weighted mean is then global, and
                   gradients must be *summed* over ranks.
    """
    weights = LossWeights() if weights is None else weights
    if draft_logits.shape != target_logits.shape or draft_logits.shape[:2] != labels.shape:
        raise ShapeError(
            f"draft_losses wants draft and target logits [N, gamma, V] and labels [N, gamma], got "
            f"{tuple(draft_logits.shape)}, {tuple(target_logits.shape)}, {tuple(labels.shape)}"
        )
    w = row_weights(valid, weights.decay_rows)
    mass = w.sum().detach()
    if reduce_sum is not None:
        mass = reduce_sum(mass)
    scale = w / mass.clamp(min=1e-12)

    log_q = functional.log_softmax(draft_logits.float(), dim=-1)
    p = functional.softmax(target_logits.detach().float(), dim=-1)
    distance = (log_q.exp() - p).abs().sum(dim=-1)
    ce = (
        scale
        * functional.nll_loss(log_q.flatten(0, 1), labels.flatten(), reduction="none").view_as(w)
    ).sum()
    l1 = (scale * distance).sum()
    accept = (1.0 - 0.5 * distance.detach()).clamp(0.0, 1.0)
    bce = torch.zeros_like(ce)
    if confidence_logits is not None:
        each = functional.binary_cross_entropy_with_logits(
            confidence_logits.float(), accept, reduction="none"
        )
        bce = (scale * each).sum()
    total = weights.ce * ce + weights.l1 * l1 + weights.confidence * bce
    rows = valid.sum(dim=0)
    run = (accept * valid).cumprod(dim=1).sum(dim=1)
    return DraftLosses(
        total=total,
        ce=ce.detach(),
        l1=l1.detach(),
        bce=bce.detach(),
        acceptance=(accept * valid).sum(dim=0) / rows,
        tau=1.0 + run.mean() if run.numel() else torch.ones(()),
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step: linear warm-up, then cosine (or none) to `floor` of the peak."""

    peak: float = 6e-4
    total_steps: int = 10_000
    warmup_fraction: float = 0.04
    floor: float = 0.0
    decay: bool = True

    def lr(self, step: int) -> float:
        """Learning rate of step 0, 1, ...; never zero during warm-up."""
        warmup = max(1, math.ceil(self.warmup_fraction * self.total_steps))
        if step < warmup:
            return self.peak * (step + 1) / warmup
        if not self.decay:
            return self.peak
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


def clip_and_step(
    optimizer: torch.optim.Optimizer, schedule: Schedule, step: int, max_norm: float = 1.0
) -> float:
    """Clip gradients by global norm, set the learning rate of `step`, update. Returns the norm."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    for group in optimizer.param_groups:
        group["lr"] = schedule.lr(step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
