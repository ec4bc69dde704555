"""What bounded replay and lost windows do to the embedded model's predictions.

    python packages/engine/benches/bench_replay.py [--documents 4]

Each row compares a way of reading a prompt with reading it whole, over the next 32 tokens of the
same held-out text: mean KL divergence in nats, how often the likeliest token is the same, and how
many nats a token the text itself becomes less likely. `compact` runs only the last `keep` tokens
through the consumer layers. `lost window` continues from compressed entries alone and runs the last
128 tokens again, then goes on at once; "x 4" does so at four borders in a row, each from what the
one before left.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from deepinfer_engine import Cache, Model, load_model
from deepinfer_engine.demo import demo_path
from deepinfer_engine.model.files import load_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tools" / "train_demo"))
import corpus

BLOCK, AFTER = 128, 32
LENGTHS = (256, 512, 1024, 2048, 4096)
Read = Callable[[np.ndarray], tuple[Model, Cache, torch.Tensor]]


def held_out(count: int, length: int, seed: int) -> list[np.ndarray]:
    """Token ids of documents the model was not trained on, joined to `length`."""
    tokenizer = load_tokenizer(demo_path())
    stream = corpus.documents(f"replay-{seed}", True, 1500, "long")
    out: list[np.ndarray] = []
    for _ in range(count):
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(next(stream)[1].text, add_special_tokens=False).ids
        out.append(np.array(ids[:length]))
    return out


def reader(model: Model) -> Read:
    """Reads a prompt in one piece."""

    def read(ids: np.ndarray) -> tuple[Model, Cache, torch.Tensor]:
        logits, cache = model.prefill(ids)
        return model, cache, logits[-1:]

    return read


def loser(model: Model, times: int) -> Read:
    """Reads a prompt, losing the window at its end and at `times - 1` borders before."""

    def read(ids: np.ndarray) -> tuple[Model, Cache, torch.Tensor]:
        at = len(ids) - BLOCK * (times - 1)
        logits, cache = model.prefill(ids[:at])
        while True:
            bare = model.new_cache()
            bare.import_blocks(cache.export_blocks(), ids[:at])
            if at == len(ids):
                return model, bare, logits[-1:]
            logits, cache = model.prefill(ids[at : at + BLOCK], cache=bare)
            at += BLOCK

    return read


def law(read: Read, ids: np.ndarray) -> torch.Tensor:
    """Log probabilities float32 [33, vocab] after ids[:-32], teacher-forced."""
    model, cache, last = read(ids[:-AFTER])
    return torch.log_softmax(torch.cat([last, model.decode(cache, ids[-AFTER:])]), -1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=4)
    count: int = parser.parse_args().documents
    torch.set_num_threads(1)
    exact = load_model(demo_path(), dtype="float32")
    least = load_model(demo_path(), dtype="float32", replay="compact")
    wide = load_model(demo_path(), dtype="float32", replay="compact", keep=256)
    ways: dict[str, Read] = {
        f"compact, keep {least.replay.keep}": reader(least),
        "compact, keep 256": reader(wide),
        "lost window": loser(exact, 1),
        "lost window x 2": loser(exact, 2),
        "lost window x 4": loser(exact, 4),
    }
    table = Table(title=f"embedded model, float32, {count} held-out documents a row")
    table.add_column("reading")
    for column in ("prompt tokens", "KL, nats", "same top token", "text costs, nats"):
        table.add_column(column, justify="right")
    texts = {n: held_out(count, n + AFTER, n) for n in LENGTHS}
    whole = {n: [law(reader(exact), ids) for ids in texts[n]] for n in LENGTHS}
    for name, read in ways.items():
        for length in LENGTHS:
            if length <= 4 * BLOCK and name[-1].isdigit() and name.startswith("lost"):
                continue  # not enough prompt before the first loss
            p = torch.stack(whole[length])
            q = torch.stack([law(read, ids) for ids in texts[length]])
            text = torch.from_numpy(np.stack([ids[-AFTER:] for ids in texts[length]]))[..., None]
            cost = (p - q)[:, :-1].gather(-1, text).mean()
            table.add_row(
                name,
                f"{length:,}",
                f"{(p.exp() * (p - q)).sum(-1).mean():.4f}",
                f"{(p.argmax(-1) == q.argmax(-1)).float().mean():.1%}",
                f"{cost:+.4f}",
            )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
