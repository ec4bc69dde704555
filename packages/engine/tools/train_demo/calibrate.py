"""Temperatures of the confidence head, fitted on held-out text."""

from __future__ import annotations

import data
import drafts
import torch
from tokenizers import Tokenizer
from torch import Tensor
from twin import Twin

GRID = torch.linspace(0.4, 3.0, 53)


def expected_calibration_error(predicted: Tensor, observed: Tensor, bins: int = 20) -> float:
    """Gap of mean prediction and observed frequency per bin, weighted by the bin's share."""
    which = (predicted * bins).long().clamp_max(bins - 1)
    gap = torch.bincount(which, predicted - observed, minlength=bins)  # sums, so weighted already
    return float(gap.abs().sum() / len(predicted))


def fit(logits: Tensor, accepted: Tensor) -> list[float]:
    """Sequential temperature scaling: logits `[A,b]`, accepted bool `[A,b]` (each draft alone).

    For k = 1..b the temperature that makes the survival of drafts 1..k best calibrated, the
    temperatures before it held.
    """
    survival = torch.ones(len(logits), dtype=torch.float64)
    temperatures: list[float] = []
    observed = accepted.cummin(-1).values.double()
    for k in range(logits.shape[1]):
        guesses = [survival * torch.sigmoid(logits[:, k].double() / t) for t in GRID]
        errors = [expected_calibration_error(g, observed[:, k]) for g in guesses]
        best = min(range(len(errors)), key=errors.__getitem__)
        temperatures.append(round(float(GRID[best]), 3))
        survival = guesses[best]
    return temperatures


def calibrate(twin: Twin, tokenizer: Tokenizer, rows: int = 12, seed: int = 7) -> list[float]:
    """Draw accept or reject for every draft position of held-out rows, then fit."""
    draw = torch.Generator().manual_seed(seed)
    logits, accepted = [], []
    for row in range(rows):
        b = data.batch(tokenizer, f"calibrate-{seed}-{row}", 1, 1024, "long", held_out=True)
        v = drafts.view(twin, b.ids, b.kinds, drafts.anchors(b.kinds, 256, row))
        full = v.valid.all(-1)
        chance = v.overlap()[full]
        logits.append(v.confidence[full])
        accepted.append(torch.rand(chance.shape, generator=draw) < chance)
    return fit(torch.cat(logits), torch.cat(accepted))
