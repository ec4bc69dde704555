"""How long a running answer waits while a long prompt is read beside it.

    python packages/engine/benches/bench_gap.py [--model demo|DIR] [--tokens 8100] [--nextn 0]

One request streams; a long prompt arrives. Prints, with prompts read in large steps of their own
and in mixed ones, the time to the long prompt's first token, and the usual and the worst gap
between the tokens of the other meanwhile, as wall time: run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time

import torch

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.types import GenerateRequest, SamplingParams, TokensEvent
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.router.local import LocalEngine

WARM = 60
"""Tokens of the running answer before the prompt comes."""


async def measure(options: argparse.Namespace, max_gap: float) -> tuple[float, float, float, float]:
    """Seconds: (to the first token, usual gap, worst gap meanwhile, its 99th percentile)."""
    runner = build_runner(
        model_directory(None if options.model == "demo" else options.model),
        num_blocks=400,
        num_state_slots=60,
        nextn=options.nextn,
    )
    engine = LocalEngine(runner, config=EngineConfig(max_gap=max_gap))
    times: list[float] = []
    started, read = asyncio.Event(), asyncio.Event()

    async def runs() -> None:
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=4000, ignore_eos=True)
        stream = engine.generate(GenerateRequest("runs", tuple(range(20, 60)), sampling))
        async for event in stream:
            if isinstance(event, TokensEvent):
                times.append(time.perf_counter())
            if len(times) == WARM:
                started.set()
            if read.is_set():
                return

    async def long() -> tuple[float, float]:
        await started.wait()
        sampling = SamplingParams(temperature=0.0, seed=1, max_tokens=2)
        prompt = tuple(5 + i % 900 for i in range(options.tokens))
        began = time.perf_counter()
        async for _ in engine.generate(GenerateRequest("long", prompt, sampling)):
            break
        ended = time.perf_counter()
        read.set()
        return began, ended

    _, (began, ended) = await asyncio.gather(runs(), long())
    await engine.close()
    gaps = [(b - a, b) for a, b in itertools.pairwise(times)]
    usual = statistics.median(gap for gap, at in gaps[5:] if at < began)
    meanwhile = sorted(gap for gap, at in gaps if at >= began)
    return ended - began, usual, meanwhile[-1], meanwhile[int(0.99 * len(meanwhile))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8100)
    parser.add_argument("--nextn", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = 0.0
    for max_gap in (0.0, EngineConfig().max_gap):
        ttft, usual, worst, p99 = asyncio.run(measure(options, max_gap))
        first = first or ttft
        kind = f"mixed steps, at most {max_gap}x" if max_gap else "steps of their own"
        print(
            f"{kind:26s} first token {ttft:5.2f} s ({ttft / first:.2f}x); gap usual "
            f"{1e3 * usual:.1f} ms, worst {1e3 * worst:.1f} ms ({worst / usual:.1f}x), "
            f"p99 {1e3 * p99:.1f} ms ({p99 / usual:.1f}x)"
        )


if __name__ == "__main__":
    main()
