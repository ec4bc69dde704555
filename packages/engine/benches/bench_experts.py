"""What a decode step costs when 1, 2 or 4 processes share the experts of the embedded model.

    python packages/engine/benches/bench_experts.py [--steps 60]

On CPUs sharing gains nothing: the processes take turns on the same cores, and every layer waits for
all of them twice. Printed beside the time of a step: processor time of all processes, the share of
the step that process 0 spends in dispatch and combine (waiting for the others included), and the
balance before and after the experts have moved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.parallel.leader import ExpertGroup
from deepinfer_engine.parallel.messages import Balancing, Setup

SIZES, BATCHES = (1, 2, 4), (1, 8)
BLOCKS, SLOTS, TABLE = 40, 12, 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)


@contextmanager
def running(size: int, every: int) -> Iterator[tuple[TorchRunner, ExpertGroup | None]]:
    """The embedded model in float32 without drafts, in so many processes of one thread each."""
    group = None
    if size > 1:
        group = ExpertGroup(
            Setup(
                rank=0,
                size=size,
                model=str(demo_path()),
                dtype="float32",
                cache_quant="reference",
                replay="off",
                keep=None,
                num_blocks=BLOCKS,
                num_slots=SLOTS,
                threads=1,
                store="",
                deadline_s=60.0,
                pools={},
                balancing=Balancing(every, redundant=size),
            )
        )
    try:
        yield (
            build_runner(
                demo_path(), num_blocks=BLOCKS, num_state_slots=SLOTS, nextn=0, group=group
            ),
            group,
        )
    finally:
        if group is not None:
            group.close()


def prefilled(runner: TorchRunner, batch: int) -> list[list[int]]:
    """Histories of `batch` sequences after their prompts."""
    tokens = load_tokenizer(demo_path()).encode("Once there was a fox who").ids
    histories: list[list[int]] = []
    for i in range(batch):
        prompt = [*tokens, *np.random.default_rng(i).integers(20, 1500, 20).tolist()]
        runner.clear_state(i + 1)
        chunk = PrefillChunk(
            np.array(prompt), 0, (), table(i), i + 1, GREEDY, True, prompt=prompt,
            prompt_len=len(prompt),
        )  # fmt: skip
        (first,) = runner.prefill([chunk])
        assert first is not None
        histories.append([*prompt, *first.tokens])
    return histories


def table(i: int) -> list[int]:
    """Blocks of sequence i."""
    return list(range(1 + TABLE * i, 1 + TABLE * (i + 1)))


def measure(
    runner: TorchRunner, group: ExpertGroup | None, batch: int, steps: int
) -> tuple[float, float, float]:
    """Of a step: (median ms, ms of processor time of all processes, share in the exchange)."""

    def exchange() -> float:
        return 0.0 if group is None else group.seat.exchange_s

    def cpu() -> float:
        return time.process_time() + (0.0 if group is None else group.cpu_s())

    histories = prefilled(runner, batch)
    times: list[float] = []
    waited, used = exchange(), cpu()
    for _ in range(steps):
        rows = [DecodeRow(h, 26, table(i), i + 1, GREEDY, 0) for i, h in enumerate(histories)]
        began = time.perf_counter()
        for history, output in zip(histories, runner.decode(rows), strict=True):
            history += output.tokens
        times.append(time.perf_counter() - began)
    total = sum(times)
    return (
        statistics.median(times) * 1e3,
        (cpu() - used) / steps * 1e3,
        (exchange() - waited) / total,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    rows = Table("processes", "batch", "ms a step", "CPU ms a step", "in the exchange", "balance")
    for size in SIZES:
        with running(size, every=2 * steps) as (runner, group):
            for batch in BATCHES:
                step_ms, cpu_ms, share = measure(runner, group, batch, steps)
                found = {} if group is None else group.gauges()
                before = found.get("eplb_plan_balance_before")
                after = found.get("eplb_plan_balance_after")
                balance = "" if before is None else f"{before:.2f} to {after:.2f}"
                rows.add_row(
                    str(size), str(batch), f"{step_ms:.1f}", f"{cpu_ms:.1f}",
                    f"{share:.0%}" if group else "", balance,
                )  # fmt: skip
    Console().print(rows)


if __name__ == "__main__":
    main()
