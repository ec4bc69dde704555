"""What one long sequence costs beside short ones, and what a prompt of 16,384 tokens costs.

    python packages/engine/benches/bench_ragged.py

CPU time of one thread on the embedded model, best of a few runs. Attention and index scoring are
per sequence, so a mixed step should cost the sum of its parts (goal: at most 1.2 times). The last
prompt tokens stand beside the floor of scoring: one matrix product and top-k of that size.
"""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer_engine.core.runner import BLOCK_TOKENS, DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.runner import TorchRunner, build_runner

LONG = 16 * 1024
CHUNK = 2048
GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
RANDOM = np.random.default_rng(0)


def best(action: Callable[[], object], repeats: int = 5) -> float:
    """Least CPU milliseconds of the repeats."""
    times: list[float] = []
    for _ in range(repeats):
        before = time.process_time()
        action()
        times.append((time.process_time() - before) * 1e3)
    return min(times)


def long_demo(folder: Path) -> TorchRunner:
    """The embedded model with room for long prompts."""
    for file in demo_path().iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 4 * LONG
    (folder / "config.json").write_text(json.dumps(config))
    return build_runner(folder, num_blocks=LONG // BLOCK_TOKENS + 100, num_state_slots=40)


class Prompts:
    """Prompts of random tokens, each with blocks and a slot of its own."""

    def __init__(self, runner: TorchRunner) -> None:
        self.runner = runner
        self._block = self._slot = 1

    def chunks(self, length: int) -> list[PrefillChunk]:
        tokens = [int(t) for t in RANDOM.integers(20, 1500, length)]
        blocks = length // BLOCK_TOKENS + 1
        table = list(range(self._block, self._block + blocks))
        slot = self._slot
        self._block, self._slot = self._block + blocks, slot + 1
        return [
            PrefillChunk(
                np.array(tokens[at : at + CHUNK]), at, tuple(tokens[max(0, at - 3) : at]), table,
                slot, GREEDY, at + CHUNK >= length, prompt_len=length, prompt=tokens,
            )
            for at in range(0, length, CHUNK)
        ]  # fmt: skip

    def row(self, chunks: list[PrefillChunk]) -> DecodeRow:
        for chunk in chunks:
            (output,) = self.runner.prefill([chunk])
        assert output is not None
        last = chunks[-1]
        history = [*last.prompt, *output.tokens]
        return DecodeRow(history, len(last.prompt), last.block_table, last.state_slot, GREEDY, 0)


def mixed(label: str, step: Callable[[list[Any]], object], long: object, short: list) -> None:
    apart = best(lambda: step([long])), best(lambda: step(short))
    together = best(lambda: step([long, *short]))
    print(
        f"{label}: {together:.1f} ms, apart {apart[0]:.1f} + {apart[1]:.1f}: "
        f"{together / sum(apart):.2f}x the sum (goal 1.2x)"
    )


def floor(runner: TorchRunner) -> float:
    """Milliseconds a chunk: a product and a top-k for each layer that scores every entry."""
    c = runner.model.config.text_config  # pyright: ignore[reportAttributeAccessIssue]
    sources = [i for i in c.index_source_layer_ids if i <= (c.candidate_source_layer_id or 1 << 30)]
    total = 0.0
    for layer in sources:
        entries = LONG // c.compress_ratios[layer]
        q, k = (
            torch.randn(CHUNK, c.index_n_heads * c.index_head_dim),
            torch.randn(entries, c.index_head_dim),
        )
        parts = q.view(-1, c.index_head_dim).split(2048)
        scores = torch.randn(CHUNK, entries)
        total += best(lambda parts=parts, k=k: [p @ k.T for p in parts], 3)
        total += best(lambda scores=scores: scores.topk(c.index_topk), 3)
    return total


def million(runner: TorchRunner) -> str:
    """Memory of scoring a million entries for 64 rows."""
    ops = runner.model._pools.ops  # pyright: ignore[reportAttributeAccessIssue]
    rows, entries, heads, dim = 64, 1 << 20, 8, 32
    cache = torch.zeros(entries // BLOCK_TOKENS, BLOCK_TOKENS * (dim // 2 + 1), dtype=torch.uint8)
    args = (
        torch.randn(rows, heads, dim), torch.randn(rows, heads), cache,
        torch.arange(len(cache))[None], torch.tensor([0, rows]),
        torch.full((rows,), entries), "index_fp4", 64, BLOCK_TOKENS, 8, 16, None,
    )  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    spent = best(lambda: ops.index_topk(*args), 1)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return (
        f"1,048,576 entries, {rows} rows: {spent:.0f} ms, {grown:.0f} MB more at the peak; their "
        f"scores alone would take {rows * entries * 4 >> 20} MB"
    )


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runner = long_demo(Path(folder))
        print(million(runner))
        prompts = Prompts(runner)
        (big,) = prompts.chunks(1850)
        small = [chunk for _ in range(15) for chunk in prompts.chunks(12)]
        mixed("prompt of 1,850 beside 15 of 12", runner.prefill, big, small)
        prompts = Prompts(runner)
        pieces = prompts.chunks(LONG)
        row = prompts.row(pieces)
        short = [prompts.row(prompts.chunks(100)) for _ in range(31)]
        mixed("decode at 16,384 beside 31 at 100", runner.decode, row, short)
        spent, least = best(lambda: runner.prefill(pieces[-1:]), 3), floor(runner)
        print(
            f"last {CHUNK} of 16,384 prompt tokens: {spent / CHUNK * 1e3:.0f} us a token; product "
            f"and top-k alone {least / CHUNK * 1e3:.0f} us: {spent / least:.2f}x (goal 2x)"
        )


if __name__ == "__main__":
    main()
