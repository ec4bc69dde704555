"""`hf.generate` beside transformers' generate and its prompt lookup, on a chat model on the CPU.

    python benches/bench_generate.py DIRECTORY [--tokens 64] [--turns 3] [--threads 1]

DIRECTORY holds a causal model with a chat template. Each row is CPU time of the process, median of
the turns, the ways taking turns, so that other work on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from deepinfer_dspark.hf import Speculation, generate

PROMPTS = {
    "chat": "Tell me about the history of tea in a few sentences.",
    "copy": "Repeat the following text exactly.\n\n"
    "The quick brown fox jumps over the lazy dog near the river bank. In the morning, the farmer "
    "walks to the market with a basket of apples, pears and plums. He sells them to the people of "
    "the town and returns home before the sun goes down.",
    "edit": "Rewrite this Python function, renaming the variable x to total, and print the whole "
    "function.\n\n```python\ndef add_numbers(values):\n    x = 0\n    for value in values:\n"
    "        x = x + value\n    print('The sum is', x)\n    return x\n```",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.directory).eval()
    print(
        f"{'text':6}{'new':>5}{'prompt lookup':>15}{'hf.generate':>13}{'no drafts':>11}{'same':>6}"
    )
    for name, prompt in PROMPTS.items():
        messages = [{"role": "user", "content": prompt}]
        ids: Any = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        options = {"max_new_tokens": args.tokens, "do_sample": False}
        done: list[Speculation] = []
        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda i=ids, o=options: model.generate(**i, **o),
            "lookup": lambda i=ids, o=options: model.generate(
                **i, prompt_lookup_num_tokens=10, **o
            ),
            "ours": lambda i=ids, o=options, d=done: generate(model, i, report=d.append, **o),
            "none": lambda i=ids, o=options: generate(model, i, speculate=False, **o),
        }
        spent: dict[str, list[float]] = {way: [] for way in ways}
        texts: dict[str, list[int]] = {}
        for _ in range(args.turns):
            for way, run in ways.items():
                start = time.process_time()
                texts[way] = run()[0].tolist()
                spent[way].append(time.process_time() - start)
        median = {way: statistics.median(times) for way, times in spent.items()}
        ratio = {way: median["plain"] / value for way, value in median.items()}
        new = len(texts["plain"]) - ids["input_ids"].shape[1]
        print(
            f"{name:6}{new:5d}{ratio['lookup']:14.2f}x{ratio['ours']:12.2f}x{ratio['none']:10.2f}x"
            f"{all(t == texts['plain'] for t in texts.values())!s:>6}"
            f"  plain {median['plain']:.2f} s; last: {done[-1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
