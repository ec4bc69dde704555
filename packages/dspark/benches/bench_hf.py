"""Speculation on transformers models on this CPU: identical text? faster than `generate`?

    OMP_NUM_THREADS=1 python packages/dspark/benches/bench_hf.py [--quick]

Two targets: (a) random weights, large enough that a forward pass costs real time; (b) a small
model trained here for a minute or two on text from a grammar below, with a smaller one trained on
the same text as its drafter. Plain greedy `generate` and each drafter take turns, so that a busy
machine slows all alike; printed are medians of ratios, of CPU time (one thread) and of wall time.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from record import record

from deepinfer_dspark import (
    BudgetScheduler,
    DraftModelDrafter,
    MixedDrafter,
    NGramDrafter,
    SamplingBatch,
    SpecLoop,
    StepTable,
)
from deepinfer_dspark.hf import HFCausal, HFTarget

DRAFTS = 4
LEXICON = """
ada ben cara dov eli fay gus hana ivo june kim lev mona nils ora pia quinn rosa sami tess uma vic
apples bolts candles drums eggs files gloves hats inks jars kites lamps
arden brill corby delph eaton frome goole hythe ilford jarrow
<s> order from in : for at each total is . , and ships to on monday tuesday friday reply dear thank
you your of will arrive by regards the clerk it
"""
NAMES, GOODS, TOWNS = (line.split() for line in LEXICON.strip().splitlines()[:3])
ID = {word: i for i, word in enumerate([*LEXICON.split(), *map(str, range(100))])}


def letter(rng: random.Random) -> list[int]:
    """An order and the reply that repeats it: half is copying, half is choice."""
    name, town, clerk = rng.choice(NAMES), rng.choice(TOWNS), rng.choice(NAMES)
    lines = [(rng.randint(2, 9), rng.choice(GOODS), rng.randint(1, 9)) for _ in range(3)]
    items = " , ".join(f"{n} {good} at {price} each" for n, good, price in lines)
    total = min(sum(n * price for n, _, price in lines), 99)
    day = rng.choice(("monday", "tuesday", "friday"))
    text = (
        f"<s> order from {name} in {town} : {items} . total is {total} . "
        f"reply : dear {name} , thank you for your order of {items} . the total is {total} . "
        f"it ships to {town} on {day} and will arrive by {day} . regards , {clerk} the clerk ."
    )
    return [ID[word] for word in text.split()]


def llama(vocab: int, hidden: int, layers: int, heads: int, seed: int = 0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=int(hidden * 8 / 3) // 32 * 32,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def train(model, seconds: float, peak: float, rows: int = 4, length: int = 160) -> float:
    """Next-token training on letters until the time is up; returns the last loss."""
    rng, start = random.Random(0), time.process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    stream: list[int] = []
    mean = 5.0
    while (spent := time.process_time() - start) < seconds:
        while len(stream) < rows * (length + 1):
            stream += letter(rng)
        ids = torch.tensor(stream[: rows * (length + 1)]).view(rows, -1)
        del stream[: rows * (length + 1)]
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, spent / 5.0 + 0.05) * (1.0 - 0.95 * spent / seconds)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean += 0.05 * (float(loss.detach()) - mean)
    model.eval()
    return mean


def generate(model, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    ids = torch.tensor(prompts)
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[:, ids.shape[1] :].tolist()


def step_table(model, R: int, context: int) -> StepTable:
    """Milliseconds of one target pass by rows in the batch, as `SpecLoop` runs it."""
    target = HFTarget(model)
    state, _ = target.start([[1] * context] * R)

    def step(size: int) -> None:
        lens = np.full(R, size // R)
        lens[: size % R] += 1
        cu = np.concatenate([[0], np.cumsum(lens)])
        at = np.concatenate([context - 1 + np.arange(n) for n in lens])
        target.forward(np.ones(size, dtype=np.int64), cu, at, state)
        target.commit(state, np.zeros(R, dtype=np.int64))

    sizes = [R * k for k in range(1, DRAFTS + 2)]
    return StepTable.measure(step, sizes, clock=time.process_time)


def compare(model, draft, prompts: list[list[int]], new: int, repeats: int) -> dict[str, Any]:
    """One row a drafter: text, tokens a target pass, time beside `generate`."""
    R, rows = len(prompts), dict[str, Any]()
    table = step_table(model, R, len(prompts[0]))
    costs = ", ".join(f"{s} rows {ms:.1f}" for s, ms in zip(table.sizes, table.ms, strict=True))
    print(f"  R = {R}, {new} new tokens each; CPU ms of a target pass: {costs}")
    makers = {
        "no drafts": lambda: None,
        "n-gram": lambda: NGramDrafter(DRAFTS),
        "draft model": lambda: DraftModelDrafter(HFCausal(draft), DRAFTS),
        "n-gram, then model": lambda: MixedDrafter(
            NGramDrafter(DRAFTS), DraftModelDrafter(HFCausal(draft), DRAFTS)
        ),
        "n-gram, scheduled": lambda: NGramDrafter(DRAFTS),
    }
    expected = generate(model, prompts, new)
    for name, make in makers.items():
        cpu, wall, made = [], [], None
        for _ in range(repeats):
            scheduler = None
            if name.endswith("scheduled"):
                scheduler = BudgetScheduler(table, DRAFTS, "exact", draft_ms=0.1)
            loop = SpecLoop(make(), HFTarget(model), scheduler)
            start, start_wall = time.process_time(), time.perf_counter()
            generate(model, prompts, new)
            middle, middle_wall = time.process_time(), time.perf_counter()
            made = loop.generate(prompts, SamplingBatch.greedy(R), new)
            cpu.append((middle - start) / (time.process_time() - middle))
            wall.append((middle_wall - start_wall) / (time.perf_counter() - middle_wall))
        assert made is not None
        same = sum(a == b for a, b in zip(made.tokens, expected, strict=True))
        print(
            f"    {name:20s} text identical {'yes' if same == R else f'no ({same} of {R})':12s} "
            f"tokens a pass {made.tokens_per_pass:4.2f}  speed {np.median(cpu):4.2f} x generate "
            f"({min(cpu):.2f}..{max(cpu):.2f}; wall {np.median(wall):.2f})",
            flush=True,
        )
        rows[name] = {
            "same": same == R, "tokens a pass": round(made.tokens_per_pass, 2),
            "times generate, CPU": round(float(np.median(cpu)), 3),
        }  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less training, one repeat")
    parser.add_argument("--train-seconds", type=float, default=25.0, help="CPU time")
    parser.add_argument("--json", type=Path, help="keep the figures here too")
    args = parser.parse_args()
    repeats, seconds = (1, 20.0) if args.quick else (2, args.train_seconds)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    model, draft = llama(8192, 768, 12, 12), llama(8192, 128, 1, 4, seed=1)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"(a) random weights, {size:.0f} M parameters; drafter: 1 layer, random too")
    prompts = rng.integers(0, 8192, (1, 24)).tolist()
    figures: dict[str, Any] = {"train_s": seconds}
    figures["(a), 1 request"] = compare(model, draft, prompts, 24 if args.quick else 32, repeats)

    model, draft = llama(len(ID), 160, 6, 5), llama(len(ID), 64, 1, 2, seed=1)
    sizes = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (model, draft)]
    losses = [train(model, seconds, 2e-3), train(draft, seconds / 3, 3e-3)]
    print(
        f"(b) trained here for {seconds:.0f} and {seconds / 3:.0f} s of CPU time: target "
        f"{sizes[0]:.1f} M parameters (loss {losses[0]:.3f}), drafter {sizes[1]:.2f} M "
        f"({losses[1]:.3f})"
    )
    source = random.Random(99)
    for R in (1, 4):
        prompts = [letter(source)[:44] for _ in range(R)]
        figures[f"(b), {R} requests"] = compare(model, draft, prompts, 60, repeats)
    record(args.json, "SpecLoop over HFTarget", figures)


if __name__ == "__main__":
    main()
