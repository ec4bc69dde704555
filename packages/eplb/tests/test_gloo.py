"""Four real processes over gloo: movements without a hang, and what a lost peer leaves behind."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
from itertools import pairwise

import numpy as np
import pytest

from deepinfer_eplb import (
    Balancer,
    EplbError,
    Gate,
    GlooTransport,
    LoadWindow,
    Plan,
    maps_of,
    movement,
    rearrange_layer,
)
from deepinfer_eplb.rearrange.layer import allocate_staging

torch = pytest.importorskip("torch", reason="the gloo transport needs torch")

RANKS, SLOTS, EXPERTS, ROUNDS, WIDTH = 4, 20, 12, 25, 40_000
C = SLOTS // RANKS
DEADLINE_S = 3.0


def placements() -> list[np.ndarray]:
    """A walk of placements: every expert somewhere, some twice on a rank, all ranks trading."""
    rng = np.random.default_rng(11)
    spare = [rng.integers(0, EXPERTS, SLOTS - EXPERTS) for _ in range(ROUNDS)]
    return [rng.permutation(np.concatenate([np.arange(EXPERTS), extra])) for extra in spare]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def join(rank: int, port: int):
    import torch.distributed as dist

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    return dist


def walker(rank: int, port: int, results) -> None:
    dist = join(rank, port)
    transport, walk = GlooTransport(), placements()
    mine = slice(rank * C, (rank + 1) * C)
    weights = [
        # big enough that no socket buffer holds a message
        np.repeat(walk[0][mine, None], WIDTH, axis=1).astype(np.float32),
        (walk[0][mine, None] * 3).astype(np.int16),
        # columns first: a row does not lie in one piece
        np.asfortranarray(np.repeat(walk[0][mine, None], 5, axis=1)),
        # a bfloat16 matrix and a vector of scales, as a model keeps them
        torch.from_numpy(walk[0][mine].copy()).to(torch.bfloat16).repeat(7, 1).T.contiguous(),
        torch.from_numpy(walk[0][mine].astype(np.float32)),
    ]
    staging, received, wrong = allocate_staging(weights), 0, 0
    for old, new in pairwise(walk):
        moves = movement(old, new, RANKS, ranks_per_node=2, buckets=3)
        received += rearrange_layer(moves, weights, staging, transport)
        for i, weight in enumerate(weights):
            held = weight.double().numpy() if isinstance(weight, torch.Tensor) else weight
            factor = 3 if i == 1 else 1
            wrong += int((held.reshape(C, -1) != new[mine, None] * factor).any())
    wrong += in_a_part_of_the_group(dist, rank)
    dist.destroy_process_group()
    results.put((rank, received, wrong))


def in_a_part_of_the_group(dist, rank: int) -> int:
    """Ranks 1 and 3 trade an expert in a group of their own, by their ranks there."""
    part = dist.new_group([1, 3])
    if rank not in (1, 3):
        return 0
    transport = GlooTransport(part)
    weights = [np.full((1, 4), float(rank))]
    moves = movement(np.array([0, 1]), np.array([1, 0]), 2)
    rearrange_layer(moves, weights, allocate_staging(weights), transport)
    transport.close()
    return int((weights[0] != {1: 3.0, 3: 1.0}[rank]).any())


def test_four_processes_carry_out_a_walk_of_placements_without_a_hang() -> None:
    port, context = free_port(), mp.get_context("fork")
    results = context.SimpleQueue()
    group = [context.Process(target=walker, args=(r, port, results)) for r in range(RANKS)]
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


class Fatal(GlooTransport):
    """Rank 2 is killed, stopped or (sign 0) fails at the nth call of a kind."""

    def __init__(self, call: str, nth: int, sign: int) -> None:
        super().__init__(deadline_s=DEADLINE_S)
        self.fatal, self.left, self.sign = call, nth, sign

    def at(self, call: str) -> None:
        if self.rank == 2 and call == self.fatal:
            self.left -= 1
            if self.left == 0 and self.sign == 0:
                raise RuntimeError("disk full")
            if self.left == 0:
                os.kill(os.getpid(), self.sign)

    def barrier(self) -> None:
        self.at("barrier")
        super().barrier()

    def batch_p2p(self, sends, receives) -> None:
        self.at("batch_p2p")
        super().batch_p2p(sends, receives)


def lose_a_peer(rank: int, port: int, fatal: tuple[str, int, int], results) -> None:
    """Rank 2 goes inside the second layer's commit; the others report what they hold."""
    join(rank, port)
    start, target = (np.stack([p] * 3) for p in placements()[:2])
    mine = slice(rank * C, (rank + 1) * C)
    weights = [[np.repeat(row[mine, None], WIDTH, axis=1).astype(np.float32)] for row in start]
    made = Plan(target, *maps_of(target, EXPERTS), RANKS, 1.0, 2.0, 0.5, 0, 0, 0.0)
    balancer = Balancer(
        3, EXPERTS, RANKS, SLOTS, transport=Fatal(*fatal), weights=weights, initial=start,
        window=LoadWindow(3, EXPERTS, blocks=2, steps_per_block=1), gate=Gate(1.0, 1.0),
        check_every=1, rearrange_every=1, record_every=1, plan_steps=0,
        planner=lambda *_, **__: made, background=lambda run: run(),
    )  # fmt: skip
    error = None
    for _ in range(8):
        try:
            balancer.step(np.ones((3, C), dtype=np.int64))
        except EplbError as e:
            error = type(e).__name__
            break
    held = balancer.local_experts()
    whole = all((w[0] == held[layer][:, None]).all() for layer, w in enumerate(weights))
    results.put((rank, error, bool(whole), balancer.generation, balancer.phy2log.tolist()))
    os._exit(0)


@pytest.mark.parametrize(
    "fatal",
    [
        ("barrier", 2, signal.SIGKILL),
        ("batch_p2p", 11, signal.SIGKILL),
        ("batch_p2p", 11, signal.SIGSTOP),
        ("batch_p2p", 11, 0),
    ],
    ids=["killed in the barrier", "killed while sending", "stopped while sending", "failed there"],
)
def test_a_lost_peer_ends_in_a_typed_error_with_the_old_layer_whole(fatal) -> None:
    context = mp.get_context("fork")
    results, port = context.SimpleQueue(), free_port()
    group = [
        context.Process(target=lose_a_peer, args=(r, port, fatal, results)) for r in range(RANKS)
    ]
    for process in group:
        process.start()
    try:
        living = group if fatal[2] == 0 else group[:2] + group[3:]
        for process in living:
            process.join(timeout=120)
            assert process.exitcode == 0, "a survivor hangs"
        reports = [results.get() for _ in living]
    finally:
        for process in group:
            process.kill()
    assert sorted(rank for rank, *_ in reports) == ([0, 1, 2, 3] if fatal[2] == 0 else [0, 1, 3])
    for rank, error, whole, generation, phy2log in reports:
        assert error == ("TransportError" if rank == 2 else "PeerLostError")
        assert whole
        assert generation == 1  # the first layer moved, the second did not
        assert phy2log == reports[0][4]
