"""What batch-invariant mode costs: forward passes with it, over the same without.

    python packages/engine/benches/bench_batch_invariant.py [--model smollm2] [--weights wide]

CPU time of one thread, the best of several passes: a prompt of 512 tokens read at once, and decode
steps of 1, 8 and 32 sequences behind 200 tokens, in float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows

PROMPT, CONTEXT, BATCHES = 512, 200, (1, 8, 32)
_BLOCKS = 4


def rows_of(runner: TorchRunner, batch: int, start: int, count: int) -> list[SequenceRows]:
    """`count` tokens of each of `batch` sequences."""
    ids = np.random.default_rng(0).integers(5, 300, size=(batch, start + count))
    back = runner.caps.lookback
    return [
        SequenceRows(
            ids[i, start:],
            start,
            tuple(ids[i, max(0, start - back) : start].tolist()) if back else (),
            list(range(1 + _BLOCKS * i, 1 + _BLOCKS * (i + 1))),
            1 + i,
        )
        for i in range(batch)
    ]


def best(runner: TorchRunner, rows: Sequence[SequenceRows], seconds: float) -> float:
    """Least milliseconds of a pass that asks for the last row's logits of each sequence."""
    last = torch.from_numpy(np.cumsum([len(r.token_ids) for r in rows]) - 1)
    least, began = float("inf"), time.thread_time()
    while time.thread_time() - began < seconds:
        before = time.thread_time()
        runner.model.forward(rows, last)
        least = min(least, time.thread_time() - before)
    return 1e3 * least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--weights", default="stored", choices=("stored", "wide"))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each pass")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = model_directory(None if options.model == "demo" else options.model)
    for dtype in ("float32", "bfloat16"):
        both = [
            build_runner(
                folder, dtype=dtype, num_state_slots=1 + max(BATCHES), batch_invariant=mode,
                num_blocks=1 + _BLOCKS * max(BATCHES), weights=options.weights,
            )
            for mode in (False, True)
        ]  # fmt: skip
        cases = [(f"prompt of {PROMPT}", 1, 0, PROMPT)]
        cases += [(f"decode, batch {n}", n, CONTEXT, 1) for n in BATCHES]
        for name, batch, start, count in cases:
            plain, fixed = (
                best(runner, rows_of(runner, batch, start, count), options.seconds)
                for runner in both
            )
            print(
                f"{dtype:9s} {name:16s} {plain:8.2f} ms, batch-invariant {fixed:8.2f} ms "
                f"({fixed / plain:.2f}x)"
            )


if __name__ == "__main__":
    main()
