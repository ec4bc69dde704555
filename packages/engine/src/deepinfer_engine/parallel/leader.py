"""The first process of an expert group: starts the others, and looks to the outside like one model.

Attention is divided by sequences: each process runs the rows of some, over cache memory that all
share; every process holds some experts of each layer, and tokens travel to them. Schedule, drafts,
sampling and the links to other workers stay here.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deepinfer_engine.adapters.dspark import GroupReducer
from deepinfer_engine.adapters.eplb import StepEvent
from deepinfer_engine.errors import CheckpointError, ConfigError, EngineError, EngineLost
from deepinfer_engine.model.family import LoadedModel
from deepinfer_engine.parallel import memory, network
from deepinfer_engine.parallel.channel import Channel
from deepinfer_engine.parallel.messages import Setup
from deepinfer_engine.parallel.model import GroupModel
from deepinfer_engine.parallel.seat import Seat

log = logging.getLogger(__name__)

_END_S = 5.0
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Member:
    """One of the other processes."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel


@dataclass(slots=True)
class Balance:
    """What the balancer did, for metrics. B: tokens of the busiest process over those of the mean
    one, 1 = even."""

    counters: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("eplb_plans", "eplb_plans_accepted", "eplb_plans_failed", "eplb_layers_moved"), 0.0
        )
    )
    gauges: dict[str, float] = field(default_factory=dict)
    planned_at: float | None = None

    def hear(self, event: StepEvent) -> None:
        """One step of the balancer."""
        if event.checked is not None:
            self.gauges["eplb_balance"] = event.checked.B
            self.gauges["eplb_balance_floor"] = event.checked.floor
        if event.decided is not None:
            self.counters["eplb_plans"] += 1
            self.counters["eplb_plans_accepted"] += bool(event.accepted)
            self.planned_at = time.monotonic()
            if event.decided.old_B is not None:
                self.gauges["eplb_plan_balance_before"] = event.decided.old_B
            self.gauges["eplb_plan_balance_after"] = event.decided.predicted_B
            self.gauges["eplb_plan_moved_share"] = event.decided.moved
        if event.kept is not None:
            self.counters["eplb_plans_failed"] += 1
        self.counters["eplb_layers_moved"] += len(event.committed)


class ExpertGroup:
    """Owner of the other processes. Made from the main thread: they end with the thread's."""

    sums: GroupReducer | None = None
    """See `ExpertLeader.sums`; here one process drafts for all."""

    def __init__(self, setup: Setup) -> None:
        """setup: that of rank 0, without `store` and `pools`. Starts the others; raises ConfigError
        where this system cannot."""
        self._pools = memory.create()
        self.folder = Path(tempfile.mkdtemp(prefix="deepinfer-group-"))
        """Where the processes find each other; nobody but their owner can look into it."""
        self._setup = replace(setup, store=str(self.folder / "store"), pools=dict(self._pools))
        self._balance = Balance()
        self._closing = self._joined = False
        self.on_lost: Callable[[str], None] = lambda text: None
        """Hears, from a thread of its own, that a process has ended."""
        self.failure = ""
        self.seat = Seat(0, setup.size, self._pools, setup.balancing, told=self._balance.hear)
        self.members: list[Member] = []
        try:
            for rank in range(1, setup.size):
                self.members.append(self._start(rank))
        except BaseException:
            self.close()
            raise
        for member in self.members:
            threading.Thread(
                target=self._watch, args=(member,), name=f"expert-{member.rank}", daemon=True
            ).start()

    @property
    def threads(self) -> int:
        """Torch threads of each process."""
        return self._setup.threads

    def lead(self, model: LoadedModel) -> GroupModel:
        """The model of this process and those of the others as one, once all have loaded.

        Raises what another one could not do: ConfigError, CheckpointError, else EngineLost."""
        self._join()
        return GroupModel(model, self.seat, [member.channel for member in self.members])

    def _join(self) -> None:
        for member in self.members:
            self._await_ready(member)
        setup = self._setup
        exchange = network.join(setup.store, 0, setup.size, setup.deadline_s)
        self._joined = True
        self.seat.join(exchange, setup.deadline_s)

    def counters(self) -> dict[str, float]:
        """Numbers that only grow."""
        return {
            **self._balance.counters,
            "eplb_commits_failed": float(self.seat.failed_commits),
            "ep_exchange_seconds": self.seat.exchange_s,
        }

    def gauges(self) -> dict[str, float]:
        """Numbers of now. The age of the last plan is there once there was one."""
        gauges = {
            **self._balance.gauges,
            "ep_processes": float(self.seat.size),
            "ep_slots": float(self.seat.slots),
            "eplb_rearranging": float(self.seat.rearranging),
        }
        if self._balance.planned_at is not None:
            gauges["eplb_plan_age_seconds"] = time.monotonic() - self._balance.planned_at
        return gauges

    def cpu_s(self) -> float:
        """Processor time that the other processes have used: a sign that a step goes on."""
        return sum(_cpu_s(member.process.pid) for member in self.members)

    def close(self) -> None:
        """End the other processes and wait for them."""
        self._closing = True
        for member in self.members:
            member.channel.close()
        ends = time.monotonic() + _END_S
        for member in self.members:
            try:
                member.process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        self.members = []
        self.seat.close()
        if self._joined:
            self._joined = False
            network.leave()
        for descriptor in self._pools.values():
            os.close(descriptor)
        self._pools = {}
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, rank: int) -> Member:
        process = subprocess.Popen(
            [sys.executable, "-m", self.command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(self._pools.values()),
            env={**os.environ, "OMP_NUM_THREADS": str(self._setup.threads)},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        read, write = os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno())
        process.stdout.close()
        process.stdin.close()
        member = Member(rank, process, Channel(read, write))
        member.channel.send(self.body_for(rank))
        return member

    def command(self) -> str:
        """The module that the other processes run."""
        return "deepinfer_engine.parallel.member"

    def body_for(self, rank: int) -> dict[str, Any]:
        """The first message to such a process."""
        return replace(self._setup, rank=rank).body()

    def _await_ready(self, member: Member) -> None:
        answer = member.channel.receive()
        if answer is not None and answer.get("ready"):
            return
        kinds: dict[str, type[EngineError]] = {
            "CheckpointError": CheckpointError,
            "ConfigError": ConfigError,
        }
        if answer is None:
            raise EngineLost(f"process {member.rank} of the expert group ended while it loaded")
        kind = kinds.get(str(answer.get("kind")), EngineLost)
        raise kind(f"process {member.rank} of the expert group: {answer.get('failed')}")

    def _watch(self, member: Member) -> None:
        code = member.process.wait()
        if not self._closing:
            self.failure = f"process {member.rank} of the expert group ended with code {code}"
            log.error("%s", self.failure)
            self.on_lost(self.failure)


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
    except (OSError, IndexError, ValueError):
        return 0.0


def threads_each(size: int, asked: int | None) -> int:
    """Torch threads of each process: as asked, or an equal share of the processors."""
    return asked or max(1, torch.get_num_threads() // size)
