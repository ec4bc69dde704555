"""Tokens per second of the embedded model on this machine, beside what its memory could give.

    python packages/engine/benches/bench_runner.py [--dtype float32] [--seconds 20]

Prints prefill and decode rates at several batch sizes, with and without drafts, each as a share of
the ceiling that one copy of the active weights a step would set (measured copy bandwidth), and the
gain of speculation and of batching. Decode at these widths is bound by the number of small
operators, not by memory: the shares say how far away the ceiling is.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.runner import TorchRunner, build_runner

BATCHES = (1, 8, 32)
PROMPT_TOKENS = 384
BLOCKS = 6  # enough for prompt and output


def copy_bandwidth() -> float:
    """Bytes per second read of a copy far larger than the caches."""
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = min(_timed(lambda: target.copy_(source)) for _ in range(5))
    return source.numel() / best


def _timed(action: object) -> float:
    start = time.perf_counter()
    action()  # type: ignore[operator]
    return time.perf_counter() - start


class Load:
    """`batch` running sequences that decode the same continuation over and over."""

    def __init__(self, runner: TorchRunner, prompt: list[int], batch: int) -> None:
        self.runner = runner
        self.params = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
        self.prompt = prompt
        self.tables = [list(range(1 + BLOCKS * i, 1 + BLOCKS * (i + 1))) for i in range(batch)]
        self.histories: list[list[int]] = []

    def prefill(self) -> float:
        """Seconds to read all prompts, one step a prompt."""
        self.histories = []
        start = time.perf_counter()
        for i, table in enumerate(self.tables):
            chunk = PrefillChunk(
                np.array(self.prompt), 0, (), table, 1 + i, self.params, True, prompt=self.prompt
            )
            (output,) = self.runner.prefill([chunk])
            assert output is not None
            self.histories.append([*self.prompt, *output.tokens])
        return time.perf_counter() - start

    def decode(self, drafts: int, seconds: float) -> tuple[float, float, float]:
        """(tokens per second, tokens per step and sequence, least CPU seconds of a step) over about
        `seconds`."""
        limit = BLOCKS * 128 - 8
        tokens = steps = 0
        least = float("inf")
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            if max(len(h) for h in self.histories) > limit:
                break
            rows = [
                DecodeRow(h, len(self.prompt), table, 1 + i, self.params, drafts)
                for i, (h, table) in enumerate(zip(self.histories, self.tables, strict=True))
            ]
            before = time.process_time()
            outputs = self.runner.decode(rows)
            least = min(least, time.process_time() - before)
            for history, output in zip(self.histories, outputs, strict=True):
                history.extend(output.tokens)
                tokens += len(output.tokens)
            steps += 1
        elapsed = time.perf_counter() - start
        return tokens / elapsed, tokens / (steps * len(self.tables)), least


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=20.0, help="for all decode rows together")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path: Path = options.model or demo_path()
    runner = build_runner(
        path,
        dtype=options.dtype,
        num_blocks=1 + BLOCKS * max(BATCHES),
        num_state_slots=1 + max(BATCHES),
    )
    text = "Ana lived near the garden with a small frog. " * 60
    prompt = load_tokenizer(path).encode(text, add_special_tokens=False).ids[:PROMPT_TOKENS]
    bandwidth = copy_bandwidth()
    weights = sum(p.numel() * p.element_size() for p in runner.dense_weights())
    ceiling = bandwidth / weights
    table = Table(title=f"embedded model, {options.dtype}, {options.threads} thread(s)")
    for column in ("batch", "drafts", "tokens/s", "tokens/step", "CPU ms", "gain", "of ceiling"):
        table.add_column(column, justify="right")
    share = options.seconds / (2 * len(BATCHES))
    for batch in BATCHES:
        load = Load(runner, prompt, batch)
        prefill = batch * len(prompt) / load.prefill()
        table.add_row(str(batch), "prefill", f"{prefill:.0f}", "", "", "", "")
        plain = 0.0
        for drafts in (0, runner.caps.nextn):
            load.prefill()
            rate, per_step, least = load.decode(drafts, share)
            plain = plain or rate
            table.add_row(
                str(batch),
                str(drafts),
                f"{rate:.0f}",
                f"{per_step:.2f}",
                f"{least * 1e3:.2f}",
                f"{rate / plain:.2f}x",
                f"{rate / (ceiling * batch * per_step):.1%}",
            )
    Console().print(table)
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; {weights / 1e6:.1f} MB of weights a step")


if __name__ == "__main__":
    main()
