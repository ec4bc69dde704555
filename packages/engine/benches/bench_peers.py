"""Prefill and decode rates beside transformers' `deepseek_v4`, on this machine, in one run.

    pip install "transformers>=5.24"
    python packages/engine/benches/bench_peers.py [--threads 1] [--dtype float32] [--batches 1 8 32]

Two random models of one size and kind (6 layers: two with a window alone, four with compressed
entries; hidden 256 in 4 streams with 20 Sinkhorn rounds, 8 experts of which 2 and one shared; 7 M
parameters). V4.1 and V4 are different architectures, so the tokens differ and only rates are
compared. Repeats of the two take turns. Beside the best wall time stands the CPU time of the whole
process, which is what to read on a machine that others use too.

    prefill tokens/s = batch * prompt / time to the first token of the whole batch
    decode tokens/s  = batch * steps / time of the steps after it

Below the table: the step of a model of one layer and width 64, whose arithmetic is next to nothing,
so that what is left is the cost of a step itself (no scheduler, speculation off).

Without transformers only our rows are printed, and that is said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.runner import BLOCK_TOKENS, DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.runner import build_runner
from deepinfer_engine.model.v41.config import load_config
from deepinfer_engine.model.v41.weights import expected_tensors

PROMPT = 256
LAYERS = 6
SHARED = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "index_n_heads": 8,
    "index_head_dim": 32,
    "index_topk": 64,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 4096,
}
OURS = {
    "qk_rope_head_dim": 16,
    "compress_ratios": [0, 0, 2, 2, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4],
}
NULL = {
    **SHARED,
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 1,
    "moe_intermediate_size": 32,
    "qk_rope_head_dim": 16,
    "compress_ratios": [0],
    "kv_source_layer_ids": [],
    "index_source_layer_ids": [],
}
THEIRS = {
    "qk_rope_head_dim": 16,
    "compress_ratios": [0, 0, 4, 4, 128, 128],
    "num_hash_layers": 0,
}


@dataclass(slots=True)
class Sample:
    """Best of the repeats so far, in seconds: wall and CPU of prefill, wall and CPU of a step."""

    prefill: float = math.inf
    prefill_cpu: float = math.inf
    step: float = math.inf
    step_cpu: float = math.inf

    def keep_best(self, other: Sample) -> None:
        """Each figure by itself."""
        for name in ("prefill", "prefill_cpu", "step", "step_cpu"):
            setattr(self, name, min(getattr(self, name), getattr(other, name)))


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU of all threads) in seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def write_random_model(path: Path, text: dict[str, Any]) -> int:
    """A V4.1 checkpoint with scaled random weights; returns its parameters."""
    root = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "tokenizer_compatibility": "native",
        "text_config": text,
    }
    (path / "config.json").write_text(json.dumps(root))
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in expected_tensors(load_config(path)).items():
        drawn = torch.randn(spec.shape, generator=generator)
        value = torch.ones(spec.shape) if "norm" in name else drawn / math.sqrt(spec.shape[-1])
        tensors[name] = value if spec.storage == "float32" else value.to(torch.bfloat16)
    save_file(tensors, str(path / "model.safetensors"))
    return sum(t.numel() for t in tensors.values())


class Ours:
    """The runner, fed as the scheduler feeds it: prompts in steps of at most its token budget."""

    def __init__(self, model_dir: Path, dtype: str, batch: int, prompts: np.ndarray, steps: int):
        blocks = -(-(PROMPT + steps + 1) // BLOCK_TOKENS)
        self.runner = build_runner(
            model_dir, dtype=dtype, num_blocks=1 + blocks * batch, num_state_slots=1 + batch
        )
        self.params = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
        self.prompts = [[int(t) for t in row] for row in prompts]
        self.tables = [list(range(1 + blocks * i, 1 + blocks * (i + 1))) for i in range(batch)]
        self.steps = steps
        self.histories: list[list[int]] = []

    def prefill(self) -> None:
        self.histories = []
        budget = EngineConfig().max_num_batched_tokens // PROMPT
        for low in range(0, len(self.prompts), budget):
            chunks = [
                PrefillChunk(
                    np.array(prompt), 0, (), self.tables[i], 1 + i, self.params, True, prompt=prompt
                )
                for i, prompt in enumerate(self.prompts[low : low + budget], low)
            ]
            for chunk, output in zip(chunks, self.runner.prefill(chunks), strict=True):
                assert output is not None
                self.histories.append([*chunk.prompt, *output.tokens])

    def decode(self) -> None:
        for _ in range(self.steps):
            rows = [
                DecodeRow(history, PROMPT, table, 1 + i, self.params, 0)
                for i, (history, table) in enumerate(zip(self.histories, self.tables, strict=True))
            ]
            for history, output in zip(self.histories, self.runner.decode(rows), strict=True):
                history.extend(output.tokens)

    def measure(self) -> Sample:
        prefill = timed(self.prefill)
        decode = timed(self.decode)
        return Sample(*prefill, *(t / self.steps for t in decode))


class Theirs:
    """transformers: the plain greedy loop over its own cache, which is `generate` without its
    bookkeeping."""

    def __init__(self, dtype: str, prompts: np.ndarray, steps: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.models.deepseek_v4 import DeepseekV4Config

        torch.manual_seed(0)
        config = DeepseekV4Config(**SHARED, **THEIRS)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        self.model = model.eval()
        self.parameters = sum(p.numel() for p in model.parameters())
        self.prompts = torch.from_numpy(prompts)
        self.steps = steps
        self.cache: Any = None
        self.last = self.prompts

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        out = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        self.cache = out.past_key_values
        self.last = out.logits[:, -1].argmax(-1, keepdim=True)

    def measure(self) -> Sample:
        self.cache = None
        prefill = timed(lambda: self._forward(self.prompts))
        decode = timed(lambda: [self._forward(self.last) for _ in range(self.steps)])
        return Sample(*prefill, *(t / self.steps for t in decode))


def compare(model_dir: Path, dtype: str, batch: int, repeats: int, steps: int) -> list[Sample]:
    """Ours, then theirs where it is installed; one untimed round first, then they take turns."""
    prompts = np.random.default_rng(0).integers(4, SHARED["vocab_size"], size=(batch, PROMPT))
    sides: list[Ours | Theirs] = [Ours(model_dir, dtype, batch, prompts, steps)]
    if importlib.util.find_spec("transformers") is not None:
        sides.append(Theirs(dtype, prompts, steps))
    best = [Sample() for _ in sides]
    for side in sides:
        side.measure()
    for _ in range(repeats):
        for sample, side in zip(best, sides, strict=True):
            sample.keep_best(side.measure())
    return best


def null_steps(model_dir: Path, batches: list[int], repeats: int, steps: int) -> str:
    """Milliseconds of a step of the null model, wall (CPU), a batch size each."""
    write_random_model(model_dir, NULL)
    torch.set_num_threads(1)
    texts: list[str] = []
    for batch in batches:
        prompts = np.random.default_rng(0).integers(4, NULL["vocab_size"], size=(batch, PROMPT))
        side, best = Ours(model_dir, "float32", batch, prompts, steps), Sample()
        for _ in range(1 + repeats):
            best.keep_best(side.measure())
        texts.append(f"{best.step * 1e3:.2f} ({best.step_cpu * 1e3:.2f})")
    return " / ".join(texts)


def rows_of(label: str, batch: int, sample: Sample, base: Sample | None) -> list[str]:
    """One line of the table; with `base`, how many times its rates ours are, wall (CPU)."""
    tokens = batch * PROMPT

    def gain(theirs: tuple[float, float], ours: tuple[float, float]) -> str:
        return f"{theirs[0] / ours[0]:.1f} ({theirs[1] / ours[1]:.1f})"

    return [
        *label.split("|"),
        str(batch),
        f"{tokens / sample.prefill:.0f}",
        f"{tokens / sample.prefill_cpu:.0f}",
        f"{batch / sample.step:.0f}",
        f"{batch / sample.step_cpu:.0f}",
        f"{sample.step * 1e3:.2f}",
        ""
        if base is None
        else gain((base.prefill, base.prefill_cpu), (sample.prefill, sample.prefill_cpu)),
        "" if base is None else gain((base.step, base.step_cpu), (sample.step, sample.step_cpu)),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    table = Table(title="tokens/s, best of the repeats; gain = ours / theirs, wall (CPU)")
    for column in ("threads", "dtype", "engine", "batch", "prefill", "a CPU-s"):
        table.add_column(column, justify="right")
    for column in ("decode", "a CPU-s", "ms/step", "prefill gain", "decode gain"):
        table.add_column(column, justify="right")
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_random_model(Path(folder), {**SHARED, **OURS})
        for threads in options.threads:
            torch.set_num_threads(threads)
            for dtype in options.dtype:
                for batch in options.batches:
                    ours, *theirs = compare(
                        Path(folder), dtype, batch, options.repeats, options.steps
                    )
                    base = theirs[0] if theirs else None
                    table.add_row(*rows_of(f"{threads}|{dtype}|ours", batch, ours, base))
                    if base is not None:
                        label = f"{threads}|{dtype}|theirs"
                        table.add_row(*rows_of(label, batch, base, None))
        null = null_steps(Path(folder), options.batches, options.repeats, 4 * options.steps)
    console.print(table)
    print(f"null model, ms a step at batch {' / '.join(map(str, options.batches))}: {null}")
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{parameters / 1e6:.1f} M parameters; prompt {PROMPT}; load average {load}")
    if importlib.util.find_spec("transformers") is None:
        print('skipped: transformers is not installed (pip install "transformers>=5.24")')


if __name__ == "__main__":
    main()
