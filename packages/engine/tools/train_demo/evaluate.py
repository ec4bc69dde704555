"""Measure a checkpoint on the held-out split: `python evaluate.py [--write]`.

With --write the figures go into `training.json` of the checkpoint and its model card.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import agents
import corpus
import data
import drafts
import torch
import torch.nn.functional as F  # noqa: N812
from card import write_card
from fast_ops import speed_up
from tokenizers import Tokenizer
from torch import Tensor
from train import DEMO
from twin import Pass, Twin, load_twin

from deepinfer_recipe import Conversation, TrainingText

EOS = 1


@torch.no_grad()
def score(twin: Twin, tokenizer: Tokenizer, text: TrainingText) -> tuple[Tensor, Tensor, list[int]]:
    """Negative log-likelihood and whether it is the argmax, of tokens 1.., and kinds."""
    ids, kinds = data.encode(tokenizer, text)
    row = torch.tensor([ids])
    logits = twin(row[:, :-1])[0]
    nll = F.cross_entropy(logits, row[0, 1:], reduction="none")
    return nll, logits.argmax(-1) == row[0, 1:], kinds


def bits_by_family(
    twin: Twin, tokenizer: Tokenizer, count: int, seed: int
) -> dict[str, dict[str, float]]:
    """Bits per byte over all text and over what the model writes, and the expert loads."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    stream = corpus.documents(f"evaluate-{seed}", True, 1500, "long")
    for _ in range(count):
        family, text = next(stream)
        nll, _, kinds = score(twin, tokenizer, text)
        written = torch.tensor(kinds[1:]) == data.ANSWER
        mine = sum(len(text.text[a:b].encode()) for a, b in text.target_ranges)
        for name in (family, "all"):
            sums[name][0] += float(nll.sum()) / math.log(2)
            sums[name][1] += len(text.text.encode())
            sums[name][2] += float(nll[written].sum()) / math.log(2)
            sums[name][3] += mine
    return {
        k: {"all": round(a / b, 4), "answers": round(c / d, 4)}
        for k, (a, b, c, d) in sorted(sums.items())
    }


def last_answer_right(twin: Twin, tokenizer: Tokenizer, conversation: Conversation) -> bool:
    """Whether greedy decoding of the last turn gives exactly the reference: it does if and only
    if every token of it is the argmax after the ones before."""
    text = corpus.render(conversation)
    _, right, _ = score(twin, tokenizer, text)
    given = len(tokenizer.encode(text.prompt, add_special_tokens=False).ids)
    return bool(right[given - 1 :].all())


def exact(
    twin: Twin,
    tokenizer: Tokenizer,
    task: Callable[[corpus.Draw], list[corpus.Turn]],
    count: int,
    seed: int,
) -> float:
    """Share of held-out one-turn tasks whose thinking and answer come out exactly."""
    d = corpus.Draw(random.Random(f"{seed}-{task.__name__}"), True)
    hits = 0
    for _ in range(count):
        turn = task(d)[0]
        hits += last_answer_right(twin, tokenizer, corpus.talk(d, None, [turn]))
    return hits / count


def tool_calls(twin: Twin, tokenizer: Tokenizer, count: int, seed: int) -> float:
    """Share of first calls of held-out conversations that are exactly the reference."""
    d = corpus.Draw(random.Random(f"{seed}-tools"), True)
    hits = done = 0
    while done < count:
        c = agents.tool_talk(d, 1500)
        first = next((i for i, m in enumerate(c.messages) if m.tool_calls), None)
        if first is None:
            continue
        done += 1
        hits += last_answer_right(
            twin,
            tokenizer,
            Conversation(c.messages[: first + 1], thinking_mode=c.thinking_mode, tools=c.tools),
        )
    return hits / count


@torch.no_grad()
def roll(
    twin: Twin, prompts: list[list[int]], new: int, temperature: float, seed: int
) -> list[list[int]]:
    """Continue every prompt by up to `new` tokens or to the end-of-sentence token."""
    draw = torch.Generator().manual_seed(seed)
    rows = [list(p) for p in prompts]
    open_ = [True] * len(rows)
    for _ in range(new):
        live = [i for i, o in enumerate(open_) if o]
        if not live:
            break
        length = max(len(rows[i]) for i in live)
        ids = torch.full((len(live), length), data.PAD_ID)
        for r, i in enumerate(live):
            ids[r, : len(rows[i])] = torch.tensor(rows[i])
        hidden = twin.trunk(ids, Pass("reference"))
        ends = torch.tensor([len(rows[i]) - 1 for i in live])
        logits = twin.head(hidden[torch.arange(len(live)), ends])
        if temperature == 0:
            picked = logits.argmax(-1)
        else:
            picked = (logits / temperature).softmax(-1).multinomial(1, generator=draw).flatten()
        for r, i in enumerate(live):
            rows[i].append(int(picked[r]))
            open_[i] = rows[i][-1] != EOS
    return rows


@torch.no_grad()
def acceptance(
    twin: Twin, tokenizer: Tokenizer, count: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Drafts accepted on the model's own continuations of held-out prompts."""
    stream = corpus.documents(f"acceptance-{seed}", True, 256, "short")
    prompts: list[list[int]] = []
    while len(prompts) < count:
        prompt = tokenizer.encode(next(stream)[1].prompt, add_special_tokens=False).ids
        if len(prompt) <= 256:
            prompts.append(prompt)
    rows = roll(twin, prompts, 80, temperature, seed)
    draw, b = torch.Generator().manual_seed(seed), twin.cfg.dspark_block_size
    offered, kept, walk, finished = torch.zeros(b), torch.zeros(b), [], 0
    for prompt, row in zip(prompts, rows, strict=True):
        finished += row[-1] == EOS
        n, first = len(row), len(prompt)
        if n - first < 3:
            continue
        kinds = torch.full((1, n), data.CONTEXT)
        kinds[0, first:] = data.ANSWER
        ids = torch.tensor([row])
        at = torch.arange(first - 1, n - 2).unsqueeze(0)
        v = drafts.view(twin, ids, kinds, at)
        if temperature == 0:
            features = twin.features(ids[:, :-1])
            base, z = twin.draft_block(features, ids, at)
            tokens, _, _ = twin.draft_tokens(base[0], z[0], ids[0, at[0] + 1])
            hit = (tokens == v.labels) & v.valid
            alone = torch.where(v.valid, (v.q.argmax(-1) == v.labels).float(), 0.0)
            survive = hit.float().cummin(-1).values
        else:
            alone = v.overlap(temperature) * v.valid
            survive = (torch.rand(alone.shape, generator=draw) < alone).float().cummin(-1).values
        offered += v.valid.sum(0)
        kept += alone.sum(0)
        # walk as decoding does: one block, then on by what was accepted and one token more
        accepted, i = survive.sum(-1), 0
        while i < len(accepted):
            walk.append(float(accepted[i]))
            i += int(accepted[i]) + 1
    return {
        "accepted_per_step": round(sum(walk) / len(walk), 3),
        "conditional": [round(float(x), 3) for x in kept / offered.clamp_min(1)],
        "finished": round(finished / count, 3),
        "samples": [
            tokenizer.decode(r[len(p) :], skip_special_tokens=False)
            for p, r in zip(prompts[:6], rows, strict=False)
        ],
    }


@torch.no_grad()
def expert_loads(twin: Twin, tokenizer: Tokenizer, seed: int) -> dict[str, list[float]]:
    """Share of picks of each expert, per layer, on held-out rows."""
    b = data.batch(tokenizer, f"loads-{seed}", 4, 1024, "long", held_out=True)
    state = Pass("reference")
    twin.trunk(b.inputs, state)
    return {k: [round(float(x), 4) for x in v / v.sum()] for k, v in state.loads.items()}


def measure_text(twin: Twin, tokenizer: Tokenizer, count: int, seed: int) -> dict[str, Any]:
    """What depends on the trunk alone."""
    tasks = (
        corpus.greeting,
        corpus.counting,
        corpus.echo,
        corpus.owners,
        corpus.sorting,
        corpus.reverse,
        corpus.arithmetic,
        corpus.capital,
    )
    return {
        "count": count,
        "bits_per_byte": bits_by_family(twin, tokenizer, count, seed),
        "exact_answers": {
            t.__name__: round(exact(twin, tokenizer, t, count, seed), 3) for t in tasks
        },
        "exact_first_tool_call": round(tool_calls(twin, tokenizer, count, seed), 3),
        "expert_loads": expert_loads(twin, tokenizer, seed),
    }


def measure_drafts(twin: Twin, tokenizer: Tokenizer, count: int, seed: int) -> dict[str, Any]:
    found = {str(t): acceptance(twin, tokenizer, count, t, seed) for t in (0.0, 0.7, 1.0)}
    return {"acceptance": found, "acceptance_count": count}


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", type=Path, default=DEMO)
    p.add_argument("--count", type=int, default=100)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--part", choices=("all", "text", "drafts"), default="all")
    p.add_argument("--write", action="store_true")
    options = p.parse_args()
    torch.set_num_threads(1)
    twin = load_twin(options.model)
    speed_up(twin)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    figures: dict[str, Any] = {}
    if options.part != "drafts":
        figures |= measure_text(twin, tokenizer, options.count, options.seed)
    if options.part != "text":
        figures |= measure_drafts(twin, tokenizer, max(1, options.count // 4), options.seed)
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if options.write:
        path = options.model / "training.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        record["evaluation"] = record.get("evaluation", {}) | figures
        path.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        if {"bits_per_byte", "acceptance"} <= record["evaluation"].keys():
            write_card(options.model)


if __name__ == "__main__":
    main()
