"""Experts over several real processes: the tokens of one, and what a lost process leaves behind."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dense_checkpoint import write_dense
from tiny_checkpoint import write_tiny

from deepinfer_engine.adapters.eplb import CommitError, EplbError
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.errors import CheckpointError, ConfigError, EngineLost
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.parallel.leader import ExpertGroup
from deepinfer_engine.parallel.messages import Balancing, Setup
from deepinfer_engine.parallel.seat import Seat

SLOTS, BLOCKS, STEPS = 12, 40, 40
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(temperature=1.0, seed=7)
SOON_S = 60.0


def setup_of(model: Path, size: int, balancing: Balancing) -> Setup:
    return Setup(
        rank=0,
        size=size,
        model=str(model),
        dtype="float64",
        cache_quant="none",
        replay="off",
        keep=None,
        num_blocks=BLOCKS,
        num_slots=SLOTS,
        threads=1,
        store="",
        deadline_s=SOON_S,
        pools={},
        balancing=balancing,
    )


def runner_of(model: Path, group: ExpertGroup | None) -> TorchRunner:
    return build_runner(
        model,
        dtype="float64",
        cache_quant="none",
        num_blocks=BLOCKS,
        num_state_slots=SLOTS,
        vision=False,
        group=group,
    )


@contextmanager
def group_of(model: Path, size: int, balancing: Balancing) -> Iterator[ExpertGroup]:
    group = ExpertGroup(setup_of(model, size, balancing))
    try:
        yield group
    finally:
        group.close()


def answers(runner: TorchRunner, steps: int, sampling: SamplingParams) -> list[list[int]]:
    """Five sequences of different lengths: their prompts, then decode steps with drafts."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, 320, size=n).tolist() for n in (3, 40, 129, 17, 1)]
    histories = [list(p) for p in prompts]
    tables = [[1 + 5 * i + b for b in range(5)] for i in range(len(prompts))]
    # Two steps for all prompts: of the first no logits are wanted.
    for last in (False, True):
        chunks = []
        for i, prompt in enumerate(prompts):
            middle = len(prompt) // 2
            if not last:
                runner.clear_state(i + 1)
            part = prompt[middle:] if last else prompt[:middle]
            if part:
                begin = middle if last else 0
                chunks.append(
                    PrefillChunk(
                        np.array(part),
                        begin,
                        tuple(prompt[max(0, begin - 3) : begin]),
                        tables[i],
                        i + 1,
                        sampling,
                        last,
                        prompt_len=len(prompt),
                        prompt=prompt,
                    )
                )
        outputs = runner.prefill(chunks)
        if last:
            for history, output in zip(histories, outputs, strict=True):
                assert output is not None
                history += output.tokens
    for step in range(steps):
        # Sequences come and go, and some steps have fewer of them than there are processes.
        live = [i for i in range(len(prompts)) if (step // 7 + i) % 3 or step % 5 == 0]
        live = live[:1] if step % 11 == 0 else live
        rows = [
            DecodeRow(histories[i], len(prompts[i]), tables[i], i + 1, sampling, runner.caps.nextn)
            for i in live
        ]
        for i, output in zip(live, runner.decode(rows), strict=True):
            histories[i] += output.tokens
    return histories


def same(found: list[list[int]], wanted: list[list[int]]) -> None:
    """One text, which steps have carried on differently far: whether they draft is a matter of how
    long they take."""
    for one, other in zip(found, wanted, strict=True):
        length = min(len(one), len(other))
        assert one[:length] == other[:length]
        assert length >= len(other) - 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("experts"), num_hidden_layers=10)


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[list[int]]]:
    runner = runner_of(model, None)
    return {
        "greedy": answers(runner, STEPS, GREEDY),
        "sampled": answers(runner, STEPS // 2, COUPLED),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_equal_those_of_one_process_while_experts_move(size, model, alone) -> None:
    with group_of(model, size, Balancing(every=20, redundant=size)) as group:
        runner = runner_of(model, group)
        same(answers(runner, STEPS, GREEDY), alone["greedy"])
        same(answers(runner, STEPS // 2, COUPLED), alone["sampled"])
        counters, gauges = group.counters(), group.gauges()
    assert counters["eplb_plans_accepted"] >= 1
    assert counters["eplb_layers_moved"] >= 1
    assert counters["ep_exchange_seconds"] > 0
    assert gauges["ep_processes"] == size
    assert gauges["ep_slots"] == {2: 10, 4: 12}[size]
    assert gauges["eplb_plan_balance_after"] <= gauges["eplb_plan_balance_before"] * 1.05
    assert gauges["eplb_balance"] >= 1
    assert gauges["eplb_plan_age_seconds"] >= 0


def test_experts_stay_where_nobody_plans(model, alone) -> None:
    with group_of(model, 2, Balancing(every=0)) as group:
        same(answers(runner_of(model, group), STEPS // 2, COUPLED), alone["sampled"])
        assert group.counters()["eplb_plans"] == 0
        assert "eplb_plan_age_seconds" not in group.gauges()


class Refusing:
    """A balancer whose step fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def step(self, counts: np.ndarray) -> None:
        raise self.error

    def close(self) -> None:
        pass


def test_a_move_that_fails_costs_the_move_and_a_lost_peer_the_group() -> None:
    seat = Seat(0, 2, {}, Balancing(every=10))
    seat.place(3, 4)
    seat._balancer = Refusing(CommitError("1 of 2 ranks could not switch a layer"))
    seat.ended()
    seat.ended()
    assert (seat.step, seat.failed_commits) == (2, 2)
    seat._balancer = Refusing(EplbError("a peer is gone"))
    with pytest.raises(EngineLost, match="moving experts failed: a peer is gone"):
        seat.ended()


def test_a_killed_process_is_heard_of_and_ends_the_step(model) -> None:
    with group_of(model, 2, Balancing(every=0)) as group:
        runner = runner_of(model, group)
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        group.on_lost = heard.put
        (member,) = group.members
        os.kill(member.process.pid, signal.SIGKILL)
        assert "process 1 of the expert group ended with code -9" in heard.get(timeout=SOON_S)
        with pytest.raises(EngineLost):
            answers(runner, 1, GREEDY)


def test_a_stopped_process_is_given_up_after_its_time(model) -> None:
    group = ExpertGroup(replace(setup_of(model, 2, Balancing(every=0)), deadline_s=3.0))
    try:
        runner = runner_of(model, group)
        os.kill(group.members[0].process.pid, signal.SIGSTOP)
        with pytest.raises(EngineLost, match="lost"):
            answers(runner, 1, GREEDY)
    finally:
        group.close()


def listening(pid: int) -> set[str]:
    """Addresses (hexadecimal) on which a process listens."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].partition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc/net/tcp")
def test_sockets_of_a_group_are_on_loopback_alone(model) -> None:
    loopback = {"0100007F", "00000000000000000000000001000000"}
    with group_of(model, 2, Balancing(every=100)) as group:
        runner_of(model, group)
        both = listening(os.getpid()) | listening(group.members[0].process.pid)
    assert both
    assert both <= loopback


def test_a_group_ends_as_a_whole(model) -> None:
    with group_of(model, 3, Balancing()) as group:
        runner_of(model, group)
        pids = [member.process.pid for member in group.members]
        store = Path(group.folder)
        assert store.stat().st_mode & 0o077 == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not store.exists()
    group.close()  # a second time is no error


def test_processes_end_with_a_leader_that_is_killed(model) -> None:
    leader = os.fork()
    if leader == 0:
        ExpertGroup(setup_of(model, 2, Balancing()))
        signal.pause()
    children = Path(f"/proc/{leader}/task/{leader}/children")
    ends = time.monotonic() + SOON_S
    while not (pids := children.read_text().split()) and time.monotonic() < ends:
        time.sleep(0.05)
    assert pids
    # Until it has asked to end with its parent: that is its first line.
    while b"member" not in Path(f"/proc/{pids[0]}/cmdline").read_bytes():
        time.sleep(0.05)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    while alive(int(pids[0])) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not alive(int(pids[0]))


def alive(pid: int) -> bool:
    try:
        return b" Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def test_what_cannot_be_shared_is_refused(model, tmp_path: Path) -> None:
    with (
        group_of(model, 9, Balancing()) as group,
        pytest.raises(ConfigError, match="9 processes cannot share 8 experts a layer"),
    ):
        runner_of(model, group)
    dense = write_dense(tmp_path / "dense")
    with (
        group_of(dense, 2, Balancing()) as group,
        pytest.raises(ConfigError, match="no experts that processes could share"),
    ):
        runner_of(dense, group)


def test_what_another_process_cannot_load_is_told_here(model, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    group = ExpertGroup(setup_of(broken, 2, Balancing()))
    try:
        with pytest.raises(CheckpointError, match=r"process 1 of the expert group: .*config\.json"):
            group.lead(runner_of(model, None).model)
    finally:
        group.close()


def test_every_process_keeps_batch_invariant_mode(model: Path) -> None:
    """A sequence has the same bits whichever process runs its rows, and beside whom."""
    ids = np.random.default_rng(3).integers(4, 320, size=(3, 60))
    setup = replace(
        setup_of(model, 2, Balancing()), dtype="float32", cache_quant="reference",
        batch_invariant=True,
    )  # fmt: skip

    def rows(i: int) -> SequenceRows:
        return SequenceRows(ids[i], 0, (), [1 + i], 1 + i)

    group = ExpertGroup(setup)
    try:
        runner = build_runner(
            model, num_blocks=BLOCKS, num_state_slots=SLOTS, vision=False, group=group,
            batch_invariant=True,
        )  # fmt: skip
        together = runner.model.forward([rows(i) for i in range(3)], None).split(60)
        for i, wanted in enumerate(together):
            runner.clear_state(1 + i)
            assert torch.equal(runner.model.forward([rows(i)], None), wanted), i
    finally:
        group.close()
