"""Four gloo processes serve a toy MoE layer under drifting load and rearrange it while it runs.

Every rank holds a few expert slots; tokens go to a replica, are multiplied by the expert's matrix
there and summed back in the order of experts. Outputs must be bit-identical to one process that
holds all experts, whatever was moved meanwhile: that is what the demo checks at every step.
"""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import socket
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.checks import check_count
from deepinfer_eplb.dispatch import dispatch
from deepinfer_eplb.evaluation import evaluate
from deepinfer_eplb.online.balancer import Balancer
from deepinfer_eplb.online.gate import Gate
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.placement import initial_placement
from deepinfer_eplb.rearrange.transport import GlooTransport, require_torch

RANKS: Final = 4
LAYERS: Final = 2
EXPERTS: Final = 12
SLOTS: Final = 16
WIDTH: Final = 16
TOKENS: Final = 96
TOPK: Final = 2
SEED: Final = 7

Float = npt.NDArray[np.float64]


def routing(step: int, layer: int) -> tuple[npt.NDArray[np.int64], Float]:
    """Experts int64 [T, k] and activations [T, WIDTH] of a step; popularity drifts with it."""
    rng = np.random.default_rng([SEED, step, layer])
    logits = 1.6 * np.cos(2 * np.pi * (np.arange(EXPERTS) / EXPERTS - step / 160.0 + layer / 3.0))
    gumbel = rng.gumbel(size=(TOKENS, EXPERTS))
    return np.argsort(-(logits + gumbel), axis=1)[:, :TOPK], rng.normal(size=(TOKENS, WIDTH))


def expert_matrices(layer: int) -> Float:
    """[E, WIDTH, WIDTH]"""
    return np.random.default_rng([SEED, 1000 + layer]).normal(size=(EXPERTS, WIDTH, WIDTH))


def combine(parts: Float) -> Float:
    """Sum [T, k, WIDTH] over k in order, so that no split over ranks changes the rounding."""
    total = parts[:, 0].copy()
    for k in range(1, parts.shape[1]):
        total += parts[:, k]
    return total


def reference(step: int) -> bytes:
    """Digest of a step's outputs computed by one process with all experts."""
    digest = hashlib.sha256()
    for layer in range(LAYERS):
        ids, x = routing(step, layer)
        matrices = expert_matrices(layer)
        parts = np.stack([_apply(matrices[ids[:, k]], x) for k in range(TOPK)], axis=1)
        digest.update(combine(parts).tobytes())
    return digest.digest()


def _apply(matrices: Float, x: Float) -> Float:
    """Row i times matrix i, one dot product at a time: equal bits for every batch."""
    return (matrices * x[:, None, :]).sum(axis=2)


def worker(rank: int, port: int, steps: int, results: Any) -> None:
    """One rank: serve `steps` steps, report digests and what was moved."""
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    transport = GlooTransport()
    start = initial_placement(LAYERS, EXPERTS, SLOTS)
    C = SLOTS // RANKS
    weights = [
        [expert_matrices(layer)[start[layer, rank * C : (rank + 1) * C]].copy()]
        for layer in range(LAYERS)
    ]
    balancer = Balancer(
        LAYERS, EXPERTS, RANKS, SLOTS,
        transport=transport,
        weights=weights,
        initial=start,
        window=LoadWindow(LAYERS, EXPERTS, blocks=16, steps_per_block=1),
        gate=Gate(t_moe_s=1.0, expert_bytes=WIDTH * WIDTH * 8, bytes_per_s=1e9),
        check_every=20, rearrange_every=20, record_every=1, plan_steps=2,
        background=lambda run: run(),  # within the step, so that every run shows the same
    )  # fmt: skip
    digests: list[bytes] = []
    log: list[tuple[int, float]] = []
    commits = 0
    for step in range(steps):
        digest = hashlib.sha256()
        counts = np.zeros((LAYERS, C), dtype=np.int64)
        for layer in range(LAYERS):
            out, counts[layer] = serve(step, layer, rank, balancer, weights[layer][0], transport)
            digest.update(out.tobytes())
        digests.append(digest.digest())
        event = balancer.step(counts)
        commits += len(event.committed)
        if event.checked is not None:
            log.append((step, event.checked.B))
    balancer.close()
    held = balancer.local_experts().tolist()
    dist.destroy_process_group()
    results.put((rank, digests, log, commits, held))


def serve(
    step: int, layer: int, rank: int, balancer: Balancer, weight: Float, transport: Any
) -> tuple[Float, npt.NDArray[np.int64]]:
    """Outputs of a step (all ranks see all tokens of the toy) and this rank's slot counts."""
    ids, x = routing(step, layer)
    slots = dispatch(ids, balancer.log2phy[layer], balancer.logcnt[layer], layer=layer, step=step)
    C = weight.shape[0]
    parts = np.zeros((TOKENS, TOPK, WIDTH))
    mine = slots // C == rank
    for k in range(TOPK):
        at = np.flatnonzero(mine[:, k])
        parts[at, k] = _apply(weight[slots[at, k] % C], x[at])
    # every entry is computed by exactly one rank and zero elsewhere: bit patterns add up exactly
    bits = transport.all_reduce_sum(parts.view(np.int64))
    counts = np.bincount(slots[mine] % C, minlength=C)
    return combine(bits.view(np.float64)), counts


def run_demo(steps: int) -> int:
    """Start the processes, compare every step with one process, print what happened."""
    check_count("steps", steps)
    require_torch()
    port = free_port()
    # forked after torch is loaded: four imports of it would take longer than the demo itself
    context = mp.get_context("fork")
    results: Any = context.SimpleQueue()
    ranks = [
        context.Process(target=worker, args=(rank, port, steps, results), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=300)
    if any(process.exitcode != 0 for process in ranks):
        for process in ranks:
            process.kill()
        print(f"a rank failed or hung: exit codes {[p.exitcode for p in ranks]}")
        return 1
    reports = sorted(results.get() for _ in ranks)
    return _report(steps, reports)


def _report(steps: int, reports: list[Any]) -> int:
    expected = [reference(step) for step in range(steps)]
    wrong = sum(
        d != e for _, digests, _, _, _ in reports for d, e in zip(digests, expected, strict=True)
    )
    _, _, log, commits, _ = reports[0]
    for step, B in log:
        print(f"step {step + 1:4d}: B of the placement in force, over the last 16 steps: {B:.3f}")
    linear = initial_placement(LAYERS, EXPERTS, SLOTS)
    loads = np.zeros((steps, LAYERS, EXPERTS))
    for step in range(steps):
        for layer in range(LAYERS):
            loads[step, layer] = np.bincount(routing(step, layer)[0].ravel(), minlength=EXPERTS)
    print(f"never rearranged, all steps: {evaluate(loads, linear, RANKS).B:.3f}")
    print(f"{commits} layer rearrangements in {steps} steps on {RANKS} gloo processes")
    print(f"steps whose output differs from one process, over all ranks: {wrong}")
    return 1 if wrong or not commits else 0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
