"""What planning while the model computes is worth, and what a step costs beside the model.

    python packages/engine/benches/bench_overlap.py            # all three, SmolLM2 where it is
    python packages/engine/benches/bench_overlap.py --device   # the timed fake device
    python packages/engine/benches/bench_overlap.py --steps    # a one-layer model, batch 1 / 8 / 32
    python packages/engine/benches/bench_overlap.py --model DIR|demo|smollm2

The fake device takes a set time for a step, computes nothing and holds no interpreter lock, like an
accelerator; everything else is the real engine: scheduler, arrays, commits, streams read by as many
asyncio tasks. The host's work is the processor time of the process a step, streams and readers
included. What the device itself takes to make values of its outputs, on a processor that slept, is
measured with nothing around it (`alone`) and taken off. Hidden is the share of the host's work that
the device does not wait for, and beside it, of what it waits for without overlap; the bubble is the
part of a step in which the device is idle, `alone` included. A real model on the CPU shares cores
and the interpreter with its host, so its row is a ratio of tokens a second and stands beside, not
for, the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import (
    CacheLayout,
    Caps,
    DecodeRow,
    PrefillChunk,
    StepOutput,
    StepRunner,
)
from deepinfer_engine.core.types import GenerateRequest, SamplingParams, TokensEvent
from deepinfer_engine.errors import CheckpointError
from deepinfer_engine.router.local import LocalEngine

STEPS_MS = (10.0, 20.0, 40.0)
SEQUENCES = (32, 256)
NEXTN = 5
MEASURED = 120
TOGETHER = 5
"""Overlapped steps a measurement of CPU time: one call ends what another began."""


class TimedDevice:
    """`StepRunner`: sleeps, then says that three of five drafts were right."""

    def __init__(self, step_ms: float, sequences: int) -> None:
        self.step_s = step_ms / 1e3
        self.busy_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.cpu: list[float] = []
        self.caps = Caps(129_280, 1 << 20, NEXTN, 3, (1,), 64 * sequences, 1 + 2 * sequences)
        self.layout = CacheLayout(128, 16, 0, (), (), "timed")

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        return [StepOutput((7,)) if chunk.sample else None for chunk in chunks]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        self.cpu.append(time.process_time())
        began = time.perf_counter()
        time.sleep(self.step_s)
        self.spans.append((began, time.perf_counter()))
        return [
            StepOutput((7,) * min(4, 1 + r.max_draft), r.max_draft, min(3, r.max_draft))
            for r in rows
        ]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        return self.prefill(chunks), self.decode(rows)

    def block_bytes(self, block_id: int) -> memoryview:
        return memoryview(bytearray(16))

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(bytearray(16))

    def clear_state(self, slot: int) -> None:
        """There is none."""


async def consume(engine: LocalEngine, prompt: Sequence[int], name: str, tokens: int) -> int:
    sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=tokens, ignore_eos=True)
    got = 0
    async for event in engine.generate(GenerateRequest(name, tuple(prompt), sampling)):
        if isinstance(event, TokensEvent):
            got += len(event.token_ids)
    return got


async def stream_all(
    runner: StepRunner, config: EngineConfig, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[int, float]:
    """(tokens, seconds)."""
    engine = LocalEngine(runner, config=config)
    began = time.perf_counter()
    got = await asyncio.gather(
        *(consume(engine, p, f"r{i}", tokens) for i, p in enumerate(prompts))
    )
    took = time.perf_counter() - began
    await engine.close()
    return sum(got), took


@dataclass(frozen=True, slots=True)
class Pause:
    """Medians, ms: the device's idle time between two steps, and a step. Of the host, the mean."""

    idle: float
    busy: float
    host: float

    @classmethod
    def of(cls, device: TimedDevice) -> Pause:
        spans, cpu = device.spans[10:-5], device.cpu[10:-5]
        idle = [1e3 * (b[0] - a[1]) for a, b in itertools.pairwise(spans)]
        busy = [1e3 * (end - start) for start, end in spans]
        host = 1e3 * (cpu[-1] - cpu[0]) / (len(cpu) - 1)
        return cls(statistics.median(idle), statistics.median(busy), host)


def pause(step_ms: float, sequences: int, *, overlap: bool) -> Pause:
    """With the engine around the device."""
    device = TimedDevice(step_ms, sequences)
    config = EngineConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=1 << 20,
        max_queue=sequences,
        overlap=overlap,
        max_gap=0.0,
    )
    prompts = [[1 + i, *range(2, 200)] for i in range(sequences)]
    asyncio.run(stream_all(device, config, prompts, 4 * MEASURED))
    return Pause.of(device)


def alone(step_ms: float, sequences: int) -> Pause:
    """The device step by step, with nothing around it."""
    device = TimedDevice(step_ms, sequences)
    rows = [DecodeRow([1], 1, [1], 0, SamplingParams(), NEXTN) for _ in range(sequences)]
    for _ in range(MEASURED):
        device.decode(rows)
    return Pause.of(device)


def timed_device() -> None:
    print(f"fake device, {NEXTN} drafts, each sequence a stream; ms, medians of {MEASURED} steps")
    print("                   idle                       host    hidden,     hidden,")
    print("sequences  device  alone  plain  overlapped    its work  of work  of waiting  bubble")
    for sequences in SEQUENCES:
        for step_ms in STEPS_MS:
            own = alone(step_ms, sequences)
            plain = pause(step_ms, sequences, overlap=False)
            hidden = pause(step_ms, sequences, overlap=True)
            waits = hidden.idle - own.idle
            host = hidden.host - own.host
            print(
                f"{sequences:9d}  {hidden.busy:6.1f}  {own.idle:5.2f}  {plain.idle:5.2f}  "
                f"{hidden.idle:10.2f}  {host:11.2f}  {1 - waits / host:7.1%}  "
                f"{1 - waits / (plain.idle - own.idle):10.1%}  "
                f"{hidden.idle / (hidden.idle + hidden.busy):6.1%}"
            )


def one_layer() -> None:
    """CPU ms of a whole step, engine included: the model is small enough to be in the noise."""
    import sys

    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from dense_checkpoint import write_dense  # pyright: ignore[reportMissingImports]

    from deepinfer_engine.core.loops import engine_loop
    from deepinfer_engine.kv.parking import HostParking
    from deepinfer_engine.model.runner import build_runner

    torch.set_num_threads(1)

    class Silent:
        def chunk_done(self, chunk: object) -> None: ...

        def progress(self, progress: object) -> None: ...

    print("one dense layer, hidden 64; CPU ms of a whole step of the process, best and median")
    print("batch  sampling  plain          overlapped")
    with tempfile.TemporaryDirectory() as folder:
        path = write_dense(Path(folder) / "one", num_hidden_layers=1)
        for batch in (1, 8, 32):
            for temperature in (0.0, 0.8):
                cells: list[str] = []
                for overlap in (False, True):
                    runner = build_runner(path, num_blocks=4 * batch + 8, num_state_slots=2)
                    config = EngineConfig(
                        max_num_seqs=batch, max_queue=batch, overlap=overlap, max_gap=0.0
                    )
                    loop = engine_loop(
                        runner, config, "both", parking=HostParking(runner, 0), link=None,
                        sink=Silent(),
                    )  # fmt: skip
                    for i in range(batch):
                        sampling = SamplingParams(
                            temperature=temperature, seed=i, max_tokens=300, ignore_eos=True
                        )
                        asked = GenerateRequest(f"r{i}", (3 + i, 4, 5, 6), sampling)
                        loop.submit(asked, f"r{i}", 0.0)
                    for n in range(20):
                        loop.step(float(n))
                    times: list[float] = []
                    together = TOGETHER if overlap else 1
                    for n in range(0, 200, together):
                        before = time.process_time()
                        for k in range(together):
                            loop.step(20.0 + n + k)
                        times.append(1e3 * (time.process_time() - before) / together)
                    loop.close()
                    cells.append(f"{min(times):5.2f} {statistics.median(times):5.2f}")
                kind = "greedy" if temperature == 0 else "sampled"
                print(f"{batch:5d}  {kind:8s}  {cells[0]:13s}  {cells[1]}")


def real_model(name: str, batch: int) -> None:
    import torch

    from deepinfer_engine.model.names import model_directory
    from deepinfer_engine.model.runner import build_runner

    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rates: dict[bool, list[float]] = {False: [], True: []}
    prompts = [rng.integers(20, 300, 60).tolist() for _ in range(batch)]
    for _ in range(3):
        for overlap in (False, True):
            runner = build_runner(
                model_directory(None if name == "demo" else name),
                num_blocks=8 * batch + 8,
                num_state_slots=2 * batch + 20,
            )
            config = EngineConfig(max_num_seqs=batch, max_queue=batch, overlap=overlap, max_gap=0.0)
            tokens, seconds = asyncio.run(stream_all(runner, config, prompts, 120))
            rates[overlap].append(tokens / seconds)
    plain, overlapped = max(rates[False]), max(rates[True])
    print(
        f"{name}, batch {batch}: {plain:.0f} tokens/s plain, {overlapped:.0f} overlapped, "
        f"ratio {overlapped / plain:.3f} (best of 3 each)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--model", default=None)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    everything = not (options.device or options.steps or options.model)
    if options.device or everything:
        timed_device()
    if options.steps or everything:
        one_layer()
    if options.model:
        real_model(options.model, options.batch)
    elif everything:
        try:
            real_model("smollm2", options.batch)
        except CheckpointError as error:
            print(f"smollm2 is left out: {error}")


if __name__ == "__main__":
    main()
