"""Four processes hold the experts of two layers, count what their slots take, and let a Balancer
move the weights while they run.

python four_processes.py
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp

from deepinfer_eplb import Balancer, GlooTransport, LoadWindow, dispatch, initial_placement

RANKS, LAYERS, EXPERTS, SLOTS, WIDTH = 4, 2, 16, 20, 8
STEPS = 600


def run(rank: int, store: str) -> None:
    """One rank of the group."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    own = slice(rank * SLOTS // RANKS, (rank + 1) * SLOTS // RANKS)
    start = initial_placement(LAYERS, EXPERTS, SLOTS)
    # Expert e of layer l has weights full of 100 l + e, so that it is known where it lies.
    weights = [
        [np.repeat(100.0 * layer + start[layer, own], WIDTH).reshape(-1, WIDTH)]
        for layer in range(LAYERS)
    ]
    # The longest wait for a peer: on a busy machine four processes do not keep step.
    transport = GlooTransport(deadline_s=120)
    balancer = Balancer(
        LAYERS,
        EXPERTS,
        RANKS,
        SLOTS,
        transport=transport,
        weights=weights,
        window=LoadWindow(LAYERS, EXPERTS, blocks=8, steps_per_block=2),
        check_every=50,
        rearrange_every=200,
        record_every=2,
        plan_steps=20,
    )
    rng = np.random.default_rng(rank)
    popular = 1 / np.arange(1, EXPERTS + 1) ** 0.8
    for step in range(STEPS):
        counts = np.zeros((LAYERS, SLOTS), dtype=np.int64)
        for layer in range(LAYERS):
            chosen = rng.choice(EXPERTS, (256, 2), p=popular / popular.sum())
            slots = dispatch(
                chosen, balancer.log2phy[layer], balancer.logcnt[layer], layer=layer, step=step
            )
            counts[layer] = np.bincount(slots.ravel(), minlength=SLOTS)
        counts = transport.all_reduce_sum(counts)  # the all-to-all of a real engine
        event = balancer.step(counts[:, own])
        if rank == 0 and event.checked is not None:
            print(f"step {step + 1}: busiest rank over the mean {event.checked.B:.2f}")
    for layer in range(LAYERS):
        held = 100.0 * layer + balancer.phy2log[layer, own]
        assert (weights[layer][0] == held[:, None]).all(), "weights and maps must agree"
    if rank == 0:
        print(f"{balancer.generation} layers were moved")
    assert balancer.generation > 0
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)


if __name__ == "__main__":
    main()
