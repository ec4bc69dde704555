"""Movement plans carried out by four real processes over gloo, many at once and never hanging."""

from __future__ import annotations

import multiprocessing as mp
import socket
from itertools import pairwise

import numpy as np
import pytest

from deepinfer_eplb import GlooTransport, movement, rearrange_layer

torch = pytest.importorskip("torch", reason="the gloo transport needs torch")

RANKS, SLOTS, EXPERTS, ROUNDS, WIDTH = 4, 20, 12, 25, 40_000


def placements() -> list[np.ndarray]:
    """A walk of placements: every expert somewhere, some twice on a rank, all ranks trading."""
    rng = np.random.default_rng(11)
    spare = [rng.integers(0, EXPERTS, SLOTS - EXPERTS) for _ in range(ROUNDS)]
    return [rng.permutation(np.concatenate([np.arange(EXPERTS), extra])) for extra in spare]


def worker(rank: int, port: int, results) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    transport, walk, C = GlooTransport(), placements(), SLOTS // RANKS
    mine = slice(rank * C, (rank + 1) * C)
    # big enough that no socket buffer holds a message, with a side tensor of another type
    weights = [
        np.repeat(walk[0][mine, None], WIDTH, axis=1).astype(np.float32),
        (walk[0][mine, None] * 3).astype(np.int16),
    ]
    staging, received, wrong = [np.empty_like(w) for w in weights], 0, 0
    for old, new in pairwise(walk):
        moves = movement(old, new, RANKS, ranks_per_node=2, buckets=3)
        received += rearrange_layer(moves, weights, staging, transport)
        wrong += int((weights[0] != new[mine, None]).any())
        wrong += int((weights[1] != new[mine, None] * 3).any())
    dist.destroy_process_group()
    results.put((rank, received, wrong))


def test_four_processes_carry_out_a_walk_of_placements_without_a_hang() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    group = [context.Process(target=worker, args=(r, port, results)) for r in range(RANKS)]
    for process in group:
        process.start()
    try:
        for process in group:
            process.join(timeout=120)
        assert [p.exitcode for p in group] == [0] * RANKS
        reports = sorted(results.get() for _ in group)
    finally:
        for process in group:
            process.kill()
    assert all(received > 0 for _, received, _ in reports)
    assert all(wrong == 0 for _, _, wrong in reports)
