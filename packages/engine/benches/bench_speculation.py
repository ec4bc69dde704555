"""What speculation gains or costs: the same requests with drafts and without, in turns.

    python packages/engine/benches/bench_speculation.py [--model demo] [--tokens 192]

Tokens a CPU second, drafting included, at several batch sizes, greedy and at temperature 1. Both
sides hold sequences of their own and take turns every few steps, so that what else the machine does
meets both. The budget learns while it runs. Step times are those of `deepinfer calibrate` where it
was run for the model, else those measured here first. Goal: never under 0.97x.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deepinfer_engine.core.device import CPU
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.calibration import measure, step_key, steps_home
from deepinfer_engine.model.files import load_tokenizer
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.speculation import StepTimes

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPT = 100
BLOCKS = 4  # enough for prompt and output
TURN = 8  # steps of one side
TEXTS = (
    "Ana lived near the garden with a small frog. ",
    "Once there was a fox who wanted to see the sea. ",
    "Ben found a red ball under the old tree. ",
    "Tell me a story about a boat and the wind. ",
)


class Side:
    """Requests of one runner, with slots and blocks from `first` on."""

    def __init__(self, runner: TorchRunner, first: int, prompts: list[list[int]], params) -> None:
        self.runner, self.params = runner, params
        self.tokens = self.drafted = self.accepted = 0
        self.seconds = 0.0
        self.prompts = prompts
        self.slots = range(first, first + len(prompts))
        self.histories: list[list[int]] = []
        for slot, prompt, own in zip(self.slots, prompts, params, strict=True):
            runner.clear_state(slot)
            chunk = PrefillChunk(
                np.array(prompt), 0, (), self._table(slot), slot, own, True,
                prompt_len=len(prompt), prompt=prompt,
            )  # fmt: skip
            (output,) = runner.prefill([chunk])
            assert output is not None
            self.histories.append([*prompt, *output.tokens])

    @staticmethod
    def _table(slot: int) -> range:
        return range(1 + BLOCKS * (slot - 1), 1 + BLOCKS * slot)

    def turn(self, most: int) -> bool:
        """Some steps; False when every sequence has `most` tokens."""
        before = time.process_time()
        for _ in range(TURN):
            live = [i for i, h in enumerate(self.histories) if len(h) < most]
            if not live:
                break
            rows = [
                DecodeRow(
                    self.histories[i], PROMPT, self._table(self.slots[i]), self.slots[i],
                    self.params[i],
                    min(self.runner.caps.nextn, most - len(self.histories[i]) - 1),
                )
                for i in live
            ]  # fmt: skip
            for i, output in zip(live, self.runner.decode(rows), strict=True):
                self.histories[i].extend(output.tokens)
                self.tokens += len(output.tokens)
                self.drafted += output.n_drafted
                self.accepted += output.n_accepted
        self.seconds += time.process_time() - before
        return any(len(h) < most for h in self.histories)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = model_directory(options.model)
    most = max(options.batches)
    runner = build_runner(directory, num_blocks=2 + 2 * BLOCKS * most, num_state_slots=2 + 2 * most)
    times = StepTimes.load(steps_home(), step_key(runner.model, "float32", CPU))
    if times is None and runner.model.drafts is not None:
        times = measure(runner.model, runner.caps.nextn)
    tokenizer = load_tokenizer(directory)
    prompts = [
        tokenizer.encode(TEXTS[i % len(TEXTS)] * 20, add_special_tokens=False).ids[: PROMPT + i % 3]
        for i in range(most)
    ]
    prompts = [prompt[-PROMPT:] for prompt in prompts]
    table = Table(title="tokens a CPU second; on / off of the same requests")
    for column in ("temperature", "batch", "on", "off", "ratio", "drafts a token", "accepted"):
        table.add_column(column, justify="right")
    worst = 9.0
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=10_000, ignore_eos=True)
                for i in range(batch)
            ]
            on = Side(
                TorchRunner(runner.model, runner.caps, CPU, times), 1, prompts[:batch], params
            )
            plain = TorchRunner(runner.model, replace(runner.caps, nextn=0))
            off = Side(plain, 1 + most, prompts[:batch], params)
            for side in (on, off):  # a server has learnt before
                side.turn(PROMPT + options.tokens)
                side.tokens = side.drafted = side.accepted = 0
                side.seconds = 0.0
            length = PROMPT + options.tokens
            while True:
                if not on.turn(length) | off.turn(length):
                    break
            rates = on.tokens / on.seconds, off.tokens / off.seconds
            worst = min(worst, rates[0] / rates[1])
            table.add_row(
                f"{temperature:g}",
                str(batch),
                f"{rates[0]:.0f}",
                f"{rates[1]:.0f}",
                f"{rates[0] / rates[1]:.2f}x",
                f"{on.drafted / on.tokens:.2f}",
                f"{on.accepted / max(on.drafted, 1):.0%}",
            )
    Console().print(table)
    print(f"worst ratio {worst:.2f}x (goal 0.97x)")


if __name__ == "__main__":
    main()
