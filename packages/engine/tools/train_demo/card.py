"""The model card, written from `training.json` so that it cannot disagree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD = """\
# deepinfer-demo

A toy of about five and a half million parameters that shows the machinery of a V4.1 decoder on
two CPU cores. **It knows nothing outside its grammar**: it was trained on conversations drawn from
a program in this repository, and on nothing else. Do not ask it for facts, advice or translations.

- Architecture: every mechanism of the V4.1 text model at small widths: shared compressed
  attention (ratios 2 and 1) with an index and a candidate level, sliding window of 128, attention
  sinks, four residual streams mixed by doubly stochastic matrices, 16 routed experts with 2 picked
  plus one shared, hashed n-gram memory, and a draft module of five tokens with a Markov and a
  confidence head. No vision weights.
- Files: `config.json`, `model.safetensors` (bfloat16; mixes, sinks and router biases float32),
  `tokenizer.json` (byte-level BPE, 1 536 entries, V4.1 special tokens), `training.json`.
- Licence: Apache-2.0. No outside text went into it.
- Prompts: the V4.1 chat format, with and without thinking, with and without tools. Positions up to
  2 048 were trained; `config.json` allows 8 192.
"""

LIMITS = """\
## What to keep in mind

- Text outside the grammar gets a fluent way of saying that it was not understood.
- The text has little entropy, so the acceptance of drafts flatters speculation. Judge a
  speculation method on a higher temperature or another model as well.
- Bits per byte are on the generated corpus (held-out combinations of its words) and compare with
  no public model.
- Exact answers demand the reference word for word, the thinking part included where there is one.
- Calls are well formed more often than right: check the arguments.
"""


def table(head: str, rows: list[tuple[str, ...]]) -> str:
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns]
    return "\n".join([*lines, *("| " + " | ".join(r) + " |" for r in rows)])


def training(record: dict[str, Any]) -> str:
    tokens = record["tokens"]
    return (
        "## Training\n\n"
        f"Seed {record['seed']}; {tokens['trunk'] / 1e6:.1f} M tokens for the trunk, "
        f"{tokens['joint'] / 1e6:.1f} M for trunk and draft module together, "
        f"{tokens['draft'] / 1e6:.1f} M for the draft module with the trunk frozen; "
        f"{record['seconds'] / 60:.0f} minutes of wall time in two processes on a shared 2-core "
        f"x86-64 CPU; {record['weights_bytes'] / 1e6:.2f} MB of weights. Repeat it with "
        "`python packages/engine/tools/train_demo/train.py`. Confidence temperatures of drafts "
        f"1..5, fitted on held-out text: {record['confidence_temperatures']}.\n"
        + "".join(f"\n{note}\n" for note in record.get("notes", []))
    )


def figures(evaluation: dict[str, Any]) -> str:
    bits = [(k, str(v["all"]), str(v["answers"])) for k, v in evaluation["bits_per_byte"].items()]
    exact = [(k, f"{v:.2f}") for k, v in evaluation["exact_answers"].items()]
    exact.append(("first tool call", f"{evaluation['exact_first_tool_call']:.2f}"))
    accepted = [
        (
            t,
            f"{a['accepted_per_step']:.2f}",
            " ".join(f"{x:.2f}" for x in a["conditional"]),
            f"{a['finished']:.2f}",
        )
        for t, a in evaluation["acceptance"].items()
    ]
    loads = [
        (k, f"{max(v) * len(v):.2f}", f"{min(v) * len(v):.2f}")
        for k, v in evaluation["expert_loads"].items()
    ]
    parts = [
        "## Measured on the held-out split",
        f"`python packages/engine/tools/train_demo/evaluate.py`: {evaluation['count']} each.",
        table("family | bits/byte, all text | bits/byte, what the model writes", bits),
        "Greedy answer equal to the reference, word for word:",
        table("task | share", exact),
        f"Drafts of the model's own continuations of {evaluation['acceptance_count']} prompts; "
        "conditional: given that those before survived.",
        table(
            "temperature | accepted of 5 per step | conditional 1..5 | ended within 80 tokens",
            accepted,
        ),
        "Picks of the fullest and the emptiest expert against an even share:",
        table("layer | fullest | emptiest", loads),
    ]
    return "\n\n".join(parts) + "\n"


def write_card(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    text = "\n".join([HEAD, training(record), figures(record["evaluation"]), LIMITS])
    (folder / "MODEL_CARD.md").write_text(text, encoding="utf-8")
