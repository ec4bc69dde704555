"""What speculation gains or costs: the same requests with drafts and without, in turns.

    python packages/engine/benches/bench_speculation.py [--model demo] [--tokens 192]

Tokens a CPU second, drafting included, at several batch sizes, greedy and at temperature 1. The
sides hold sequences of their own and take turns every few steps, so that what else the machine does
meets all. `ratio` is the median over rounds of the whole requests.
A third side without drafts stands beside the other one as well: what its ratio is off 1 by is noise
and no gain or cost. The budget learns while it runs. Step times are those of `deepinfer calibrate`
where it was run for the model, else those measured here first. The embedded model goes on with
stories, another model with a text that repeats itself. Goal: never under 0.97x.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

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

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "train_demo"))
import corpus

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
        self.prompts = prompts
        self.slots = range(first, first + len(prompts))
        self.begin()

    def begin(self) -> None:
        """Read the prompts, once more if they were read before."""
        self.tokens = self.drafted = self.accepted = 0
        self.seconds = 0.0
        self.histories: list[list[int]] = []
        runner = self.runner
        for slot, prompt, own in zip(self.slots, self.prompts, self.params, strict=True):
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


def stories(count: int) -> list[str]:
    """What the embedded model writes best, of texts that it was not trained on."""
    stream = corpus.documents("speculation", True, 1500, "long")
    return list(itertools.islice((document.text for _, document in stream), count))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = model_directory(options.model)
    most = max(*options.batches, BATCHES[-1])  # `measure` wants so many as well
    runner = build_runner(directory, num_blocks=2 + 3 * BLOCKS * most, num_state_slots=2 + 3 * most)
    times = StepTimes.load(steps_home(), step_key(runner.model, "float32", CPU))
    if times is None and runner.model.drafts is not None:
        times = measure(runner.model, runner.caps.nextn).times
    tokenizer = load_tokenizer(directory)
    told = [TEXTS[i % len(TEXTS)] * 20 for i in range(most)] if options.model else stories(most)
    prompts = [
        tokenizer.encode(text, add_special_tokens=False).ids[i % 3 :][:PROMPT]
        for i, text in enumerate(told)
    ]
    table = Table(title="tokens a CPU second; on / off of the same requests")
    for column in (
        "temperature",
        "batch",
        "on",
        "off",
        "ratio",
        "noise",
        "drafts a token",
        "accepted",
    ):
        table.add_column(column, justify="right")
    worst = 9.0
    length = PROMPT + options.tokens
    for temperature in (0.0, 1.0):
        for batch in options.batches:
            params = [
                SamplingParams(temperature=temperature, seed=i, max_tokens=10_000, ignore_eos=True)
                for i in range(batch)
            ]
            plain = TorchRunner(runner.model, replace(runner.caps, nextn=0))
            drafting = TorchRunner(runner.model, runner.caps, CPU, times)
            sides = [
                Side(its, 1 + i * most, prompts[:batch], params)
                for i, its in enumerate((drafting, plain, plain))
            ]
            for side in sides:  # a server has learnt before
                side.turn(length)
            rounds = [one_round(sides, length) for _ in range(options.rounds)]
            on, off, _ = (statistics.median(rates) for rates in zip(*rounds, strict=True))
            ratio = statistics.median(rates[0] / rates[1] for rates in rounds)
            noise = statistics.median(rates[2] / rates[1] for rates in rounds)
            worst = min(worst, ratio)
            drafted = sides[0].drafted
            table.add_row(
                f"{temperature:g}",
                str(batch),
                f"{on:.0f}",
                f"{off:.0f}",
                f"{ratio:.2f}x",
                f"{noise - 1:+.0%}",
                f"{drafted / sides[0].tokens:.2f}",
                f"{sides[0].accepted / max(drafted, 1):.0%}",
            )
    Console().print(table)
    print(f"worst ratio {worst:.2f}x (goal 0.97x)")


def one_round(sides: list[Side], length: int) -> list[float]:
    """Tokens a CPU second of each side, from the prompt to `length` tokens, in turns."""
    for side in sides:
        side.begin()
    while sum(side.turn(length) for side in sides):  # all of them take their turn
        pass
    return [side.tokens / side.seconds for side in sides]


if __name__ == "__main__":
    main()
