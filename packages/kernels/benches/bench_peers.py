"""Operators against what a model written with torch alone would call, one thread, one run.

    python packages/kernels/benches/bench_peers.py

The peers do less where torch has no such operator: its attention takes keys already gathered and
knows no sink, its top-k leaves ties open. Times are the best of many samples, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_kernels import ops
from deepinfer_kernels.bench import timed

SECONDS = 0.3
ROWS = (1, 6, 48)
HEADS, DIM, KEYS, HIDDEN, EXPERTS, INNER, TOP = 6, 64, 192, 192, 16, 64, 2


def expert_loop(x: Tensor, idx: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
    """The usual form: for each expert, the rows that chose it."""
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        row, slot = torch.where(idx == expert)
        if row.numel():
            part = x[row]
            gate = functional.silu(functional.linear(part, w1[expert]).clamp(max=10))
            up = functional.linear(part, w3[expert]).clamp(-10, 10)
            down = functional.linear(gate * up, w2[expert])
            out.index_add_(0, row, down * w[row, slot, None])
    return out


def pairs(n: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Operator, ours, peer."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(n, HIDDEN, generator=g), torch.rand(HIDDEN, generator=g)
    q, kv = torch.randn(n, HEADS, DIM, generator=g), torch.randn(800, DIM, generator=g)
    chosen = torch.stack([torch.randperm(800, generator=g)[:KEYS] for _ in range(n)])
    gathered = kv[chosen].unsqueeze(1)
    scores = torch.randn(n, 512, generator=g)
    table = torch.randn(EXPERTS, INNER, HIDDEN, generator=g) / HIDDEN**0.5
    back = torch.randn(EXPERTS, HIDDEN, INNER, generator=g) / INNER**0.5
    idx = torch.rand(n, EXPERTS, generator=g).topk(TOP).indices
    w, sink = torch.rand(n, TOP, generator=g), torch.zeros(HEADS)
    return {
        "rms_norm": (
            lambda: ops.rms_norm(x, weight, 1e-6),
            lambda: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        ),
        "mla_sparse": (
            lambda: ops.mla_sparse(q, kv, chosen, sink, DIM**-0.5),
            lambda: functional.scaled_dot_product_attention(
                q.unsqueeze(2), gathered, gathered, enable_gqa=True
            ),
        ),
        "topk_select": (
            lambda: ops.topk_select(scores, 64),
            lambda: scores.topk(64).indices.sort().values,
        ),
        "moe_experts": (
            lambda: ops.moe_experts(x, idx, w, table, table, back, 10.0),
            lambda: expert_loop(x, idx, w, table, table, back),
        ),
    }


def main() -> int:
    torch.set_num_threads(1)
    print(f"{'operator':14} {'rows':>5} {'ours us':>9} {'torch us':>9} {'times':>7}")
    with torch.inference_mode():
        for n in ROWS:
            for name, (ours, peer) in pairs(n).items():
                mine, theirs = timed(ours, SECONDS)[0], timed(peer, SECONDS)[0]
                print(f"{name:14} {n:5} {mine:9.1f} {theirs:9.1f} {theirs / mine:7.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
