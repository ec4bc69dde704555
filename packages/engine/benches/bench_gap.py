"""How long a running answer waits while a long prompt is read beside it.

    python packages/engine/benches/bench_gap.py [--model demo|DIR] [--tokens 8100] [--nextn 0]

One request streams; a long prompt arrives. Prints, with prompts read in large steps of their own
and in mixed ones, the time to the long prompt's first token, and the usual and the worst gap
between the tokens of the other meanwhile. The clock is the CPU time of the one thread that does
everything, which is wall time on an idle machine and does not count neighbours on a busy one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.loops import engine_loop
from deepinfer_engine.core.plan import Chunk, Progress
from deepinfer_engine.core.types import GenerateRequest, SamplingParams
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import build_runner

WARM = 60
"""Tokens of the running answer before the prompt comes."""


class Times:
    """When each request said something."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {"runs": [], "long": []}

    def chunk_done(self, chunk: Chunk) -> None:
        """Nothing is sent."""

    def progress(self, progress: Progress) -> None:
        self.of[progress.seq.key].append(time.thread_time())


def measure(options: argparse.Namespace, max_gap: float) -> tuple[float, float, list[float]]:
    """Seconds: to the first token, usual gap, the gaps meanwhile in order of length."""
    runner = build_runner(
        model_directory(None if options.model == "demo" else options.model),
        num_blocks=400,
        num_state_slots=60,
        nextn=options.nextn,
    )
    times = Times()
    config = EngineConfig(max_gap=max_gap)
    loop = engine_loop(
        runner, config, "both", parking=HostParking(runner, 0), link=None, sink=times
    )
    greedy = SamplingParams(temperature=0.0, seed=1, max_tokens=8000, ignore_eos=True)
    loop.submit(GenerateRequest("runs", tuple(range(20, 60)), greedy), "runs", 0.0)
    while len(times.of["runs"]) < WARM:
        loop.step(time.thread_time())
    began = time.thread_time()
    prompt = tuple(5 + i % 900 for i in range(options.tokens))
    loop.submit(GenerateRequest("long", prompt, greedy), "long", began)
    while not times.of["long"]:
        loop.step(time.thread_time())
    loop.step(time.thread_time())
    at = times.of["runs"]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    usual = statistics.median(gaps[5 : WARM - 1])
    return times.of["long"][0] - began, usual, sorted(gaps[WARM - 1 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=8100)
    parser.add_argument("--nextn", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = 0.0
    for max_gap in (0.0, EngineConfig().max_gap):
        ttft, usual, gaps = measure(options, max_gap)
        first = first or ttft
        kind = f"mixed steps, at most {max_gap}x" if max_gap else "steps of their own"
        p99 = gaps[int(0.99 * (len(gaps) - 1))]
        print(
            f"{kind:26s} first token {ttft:5.2f} s ({ttft / first:.2f}x); {len(gaps)} tokens "
            f"meanwhile; gap usual {1e3 * usual:.1f} ms, median "
            f"{1e3 * statistics.median(gaps):.1f} ms "
            f"({statistics.median(gaps) / usual:.1f}x), p99 {1e3 * p99:.1f} ms "
            f"({p99 / usual:.1f}x), worst {1e3 * gaps[-1]:.1f} ms ({gaps[-1] / usual:.1f}x)"
        )


if __name__ == "__main__":
    main()
