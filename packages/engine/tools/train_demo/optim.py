"""Muon for the matrices of the trunk, AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonalise(G: Tensor, steps: int = 5) -> Tensor:
    """Nearest orthogonal matrices of a batch `[n, rows, columns]`, roughly (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = G.shape[-2] > G.shape[-1]
    X = G.mT if tall else G
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal; matrices of one shape are done in one batch."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                shapes[p.shape[-2:]].append((p, p.grad.lerp(m, group["momentum"])))
            for shape, found in shapes.items():
                flat = [u.reshape(-1, *shape) for _, u in found]
                done = orthogonalise(torch.cat(flat)).split([len(u) for u in flat])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), u in zip(found, done, strict=True):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(u.view_as(p), alpha=-group["lr"] * scale)


# Names of the parameters that AdamW takes, and their share of its learning rate.
ADAM = {
    "embed.weight": 1.0,
    "head.weight": 1.0,
    "markov_head": 1.0,
    "norm": 0.5,
    "hc_": 0.5,
    "attn_sink": 0.5,
    "gate.weight": 0.5,
    "weights_proj": 0.5,
    "q_weight": 0.5,
    "k_weight": 0.5,
    "confidence_head": 0.3,
}


def optimisers(
    named: list[tuple[str, nn.Parameter]], muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    matrices: list[nn.Parameter] = []
    shares: dict[float, list[nn.Parameter]] = defaultdict(list)
    for name, p in named:
        share = next((s for key, s in ADAM.items() if key in name), None)
        if share is None:
            matrices.append(p)
        else:
            shares[share].append(p)
    groups = [{"params": ps, "lr": adam_lr * share} for share, ps in shares.items()]
    out: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    ]
    if matrices:
        out.append(Muon(matrices, muon_lr, decay=0.1))
    for optimiser in out:
        for group in optimiser.param_groups:
            group["peak"] = group["lr"]
    return out
