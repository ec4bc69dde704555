"""Processes serve a toy MoE layer while one joins, one is killed and one leaves.

    3 ranks -> a 4th joins -> rank 1 is killed in the middle of a step -> one leaves in order

After each change the group plans for the new number of ranks, moves what must move, loads from a
checkpoint what only the lost rank held, and goes on with the step it was at. Outputs of every step
must be bit-identical to one process that holds all experts.
"""

from __future__ import annotations

import hashlib
import multiprocessing as mp
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_eplb.bench.demo import (
    EXPERTS,
    LAYERS,
    WIDTH,
    expert_matrices,
    free_port,
    reference,
    serve,
)
from deepinfer_eplb.checks import check_count
from deepinfer_eplb.errors import PeerLostError
from deepinfer_eplb.online.balancer import Balancer
from deepinfer_eplb.online.elastic import replan
from deepinfer_eplb.online.gate import Gate
from deepinfer_eplb.online.window import LoadWindow
from deepinfer_eplb.placement import initial_placement
from deepinfer_eplb.rearrange.movement import resize
from deepinfer_eplb.rearrange.resize import resize_layer
from deepinfer_eplb.rearrange.transport import GlooTransport, require_torch

Weights = list[list[npt.NDArray[Any]]]


@dataclass(frozen=True)
class Change:
    """members: processes that serve from here on, in rank order; ranks: what each one's rank was
    before, -1 for a newcomer; leaving: (process, its rank before) that go in order."""

    name: str
    members: tuple[int, ...]
    slots: int
    ranks: tuple[int, ...]
    leaving: tuple[tuple[int, int], ...] = ()


START: Final = (0, 1, 2)
START_SLOTS: Final = 15
VICTIM: Final = 1
CHANGES: Final = (
    Change("process 3 joins", (0, 1, 2, 3), 16, (0, 1, 2, -1)),
    Change("process 1 is killed", (0, 2, 3), 15, (0, 2, 3)),
    Change("process 3 leaves", (0, 2), 14, (0, 1), ((3, 2),)),
)
PROCESSES: Final = 4


def worker(process: int, port: int, steps: int, results: Any) -> None:
    """One process through all phases; puts (process, digests, what it noted, its experts)."""
    digests: list[bytes] = []
    notes: list[str] = []
    balancer: Balancer | None = None
    weights: Weights = []
    transport: GlooTransport | None = None
    if process in START:
        transport = _join(port, 0, process, len(START))
        placed = initial_placement(LAYERS, EXPERTS, START_SLOTS)
        held = placed.reshape(LAYERS, len(START), -1)[:, process]
        weights = [[expert_matrices(layer)[held[layer]].copy()] for layer in range(LAYERS)]
        balancer = _balancer(placed, len(START), transport, weights, None)
    for phase in range(len(CHANGES) + 1):
        if balancer is not None and transport is not None:
            # the killed process takes no further step; the others find out inside that step
            last = CHANGES[phase].name if phase < len(CHANGES) else ""
            killed = "killed" in last
            end = (phase + 1) * steps + killed
            while len(digests) < end:
                if killed and len(digests) == end - 1 and process == VICTIM:
                    os.kill(os.getpid(), signal.SIGKILL)
                try:
                    digests.append(_step(len(digests), balancer, weights, transport))
                except PeerLostError:
                    break
        if phase == len(CHANGES):
            break
        change = CHANGES[phase]
        everyone = [*change.members, *(p for p, _ in change.leaving)]
        if process not in everyone:
            continue  # has yet to join
        meeting = _join(port, 2 * phase + 1, everyone.index(process), len(everyone))
        if balancer is not None and change.name.endswith("killed"):
            balancer.settle(meeting)
        placed, weights, note = _resized(change, phase, meeting, balancer, weights)
        notes.append(note)
        window = None if balancer is None else balancer.window
        if not weights:
            balancer = None
            break
        if change.leaving:
            index = change.members.index(process)
            transport = _join(port, 2 * phase + 2, index, len(change.members))
        else:
            transport = meeting
        balancer = _balancer(placed, len(change.members), transport, weights, window)
        # a newcomer starts where the others are: it served none of the steps before
        digests += [b""] * ((phase + 1) * steps - len(digests))
    held = [] if balancer is None else balancer.local_experts().tolist()
    results.put((process, digests, notes, held))


def _join(port: int, meeting: int, rank: int, size: int) -> GlooTransport:
    """A fresh process group under a name of its own, at a store that no rank hosts."""
    dist: Any = require_torch().distributed
    if dist.is_initialized():
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"meeting{meeting}", store), rank=rank, world_size=size
    )
    return GlooTransport()


def _balancer(
    placed: Any, gpus: int, transport: GlooTransport, weights: Weights, window: LoadWindow | None
) -> Balancer:
    return Balancer(
        LAYERS, EXPERTS, gpus, placed.shape[1],
        transport=transport, weights=weights, initial=placed,
        window=window or LoadWindow(LAYERS, EXPERTS, blocks=16, steps_per_block=1),
        gate=Gate(t_moe_s=1.0, expert_bytes=WIDTH * WIDTH * 8, bytes_per_s=1e9),
        check_every=5, rearrange_every=5, record_every=1, plan_steps=1,
        background=lambda run: run(),  # within the step, so that every run shows the same
    )  # fmt: skip


def _step(step: int, balancer: Balancer, weights: Weights, transport: GlooTransport) -> bytes:
    digest = hashlib.sha256()
    counts = np.zeros((LAYERS, weights[0][0].shape[0]), dtype=np.int64)
    for layer in range(LAYERS):
        out, counts[layer] = serve(
            step, layer, transport.rank, balancer, weights[layer][0], transport
        )
        digest.update(out.tobytes())
    balancer.step(counts)
    return digest.digest()


def _resized(
    change: Change,
    phase: int,
    meeting: GlooTransport,
    balancer: Balancer | None,
    weights: Weights,
) -> tuple[Any, Weights, str]:
    """(placement of the new topology, weights there, none for one that leaves; what happened)."""
    gpus, C = len(change.members), change.slots // len(change.members)
    old_gpus = len(CHANGES[phase - 1].members) if phase else len(START)
    placed, made = replan(
        meeting, LAYERS, EXPERTS, gpus, change.slots, change.ranks, old_gpus=old_gpus,
        old=None if balancer is None else balancer.phy2log,
        window=None if balancer is None else balancer.window,
    )  # fmt: skip
    leaving = [rank for _, rank in change.leaving]
    stays = meeting.rank < gpus
    fresh: Weights = []
    received = loaded = 0
    for layer in range(LAYERS):
        moves = resize(placed[layer], made.phy2log[layer], old_gpus, gpus, change.ranks, leaving)
        target = [np.empty((C, WIDTH, WIDTH))] if stays else []
        source = expert_matrices(layer)  # stands for the checkpoint

        def load(expert: int, source: Any = source) -> list[Any]:
            return [source[expert]]

        received += resize_layer(moves, weights[layer] if weights else [], target, meeting, load)
        loaded += sum(len(part) for part in moves.load)
        fresh.append(target)
    note = (
        f"{change.name}: {gpus} ranks of {C} slots; {made.moved:.0%} of the slots arrived from "
        f"elsewhere, {loaded} of them from the checkpoint; this process received {received} bytes"
    )
    return made.phy2log, fresh if stays else [], note


def run_elastic(steps: int) -> int:
    """Run all phases of `steps` steps each, compare with one process, print what happened."""
    check_count("steps", steps)
    torch = require_torch()
    port = free_port()
    # forked after torch is loaded: four imports of it would take longer than the demo itself
    context = mp.get_context("fork")
    results: Any = context.SimpleQueue()
    group = [
        context.Process(target=worker, args=(p, port, steps, results), daemon=True)
        for p in range(PROCESSES)
    ]
    for process in group:
        process.start()
    # hosted here, so that no rank's end takes the meeting place along; after the forks: its threads
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for process in group:
        process.join(timeout=300)
    codes = [process.exitcode for process in group]
    if codes != [0, -signal.SIGKILL, 0, 0]:
        for process in group:
            process.kill()
        print(f"a process failed or hung: exit codes {codes}")
        return 1
    del store
    return _report(steps, sorted(results.get() for _ in range(PROCESSES - 1)))


def _report(steps: int, reports: list[Any]) -> int:
    total = (len(CHANGES) + 1) * steps
    expected = [reference(step) for step in range(total)]
    wrong = compared = 0
    for _, digests, _, _ in reports:
        for ours, right in zip(digests, expected, strict=False):
            compared += ours != b""
            wrong += ours not in (b"", right)
    for note in reports[0][2]:
        print(note)
    done = len(reports[0][1]) == total
    print(f"steps compared with one process, over all ranks: {compared}; different: {wrong}")
    return 1 if wrong or not done else 0
