"""Random requests to the toy, run in every way a loop can run them."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from toy_engine import BLOCK, Recorder, hand_loop, prompt, request, toy
from toy_grammar import ToyGrammar

from deepinfer_engine.core.constraint import ConstraintState
from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.plan import Progress
from deepinfer_engine.core.types import SamplingParams

GRAMMARS = ("tens", "dies", "endless")
POOLS = (14, 20, 40)
"""Blocks; the longest request needs nine."""


@dataclass(frozen=True)
class Wanted:
    name: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    grammar: str | None
    abort_after: int | None
    """Tokens behind which it is aborted; None: never."""
    after: int
    """Steps between the one before and this."""


def wanted(seed: int, count: int) -> list[Wanted]:
    """`count` requests: shared and equal prompts, stops, grammars, limits, aborts."""
    random = Random(seed)
    out: list[Wanted] = []
    while len(out) < count:
        shared = prompt(random.randrange(4), random.choice([0, 3, BLOCK, 2 * BLOCK]))
        tokens = shared + prompt(random.randrange(1 << 20), random.randint(1, 3 * BLOCK))
        grammar = random.choice(GRAMMARS) if random.random() < 0.25 else None
        answers = random.choice([1, 1, 1, 2, 4])
        after = random.randrange(4)
        for n in range(min(answers, count - len(out))):
            limit = random.randint(1, 24)
            sampling = SamplingParams(
                temperature=random.choice([0.0, 1.0]),
                seed=random.randrange(1 << 30),
                max_tokens=limit,
                min_tokens=0 if grammar else random.choice([0, 0, min(3, limit)]),
                ignore_eos=grammar is None and random.random() < 0.3,
                stop_token_ids=tuple(random.sample(range(250), random.choice([0, 0, 8, 30]))),
                logprobs=random.choice([None, None, 2]),
                priority=random.choice([0, 0, 0, -1, 2]),
            )
            aborted = random.randint(0, 10) if random.random() < 0.1 else None
            out.append(
                Wanted(f"r{len(out)}", tokens, sampling, grammar, aborted, 0 if n else after)
            )
    return out


@dataclass
class Aborting(Recorder):
    """Keeps log-probabilities too, and aborts who has said enough."""

    after: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    loop: EngineLoop | None = None

    def progress(self, progress: Progress) -> None:
        super().progress(progress)
        key = progress.seq.key
        self.logprobs.setdefault(key, []).extend(progress.logprobs)
        if progress.finish is None and len(self.tokens[key]) >= self.after.get(key, 1 << 30):
            assert self.loop is not None
            self.loop.abort(key)


Said = dict[str, tuple[list[int], list[Any], str]]


def run_all(
    requests: list[Wanted],
    *,
    nextn: int,
    blocks: int = 256,
    alone: bool = False,
    runner: Any = None,
    **config: Any,
) -> Said:
    """Run them; (tokens, log-probabilities, reason) of each. alone: one at a time.

    runner: instead of a toy of that many drafts and blocks.
    """
    runner = runner or toy(num_blocks=blocks, num_state_slots=10, nextn=nextn)
    loop, _ = hand_loop(runner, **config)
    sink = loop._sink = Aborting(loop=loop)  # type: ignore[assignment]
    now = 0.0
    for one in requests:
        state = None if one.grammar is None else ConstraintState(ToyGrammar(one.grammar), "")
        if one.abort_after is not None:
            sink.after[one.name] = one.abort_after
        loop.submit(request(one.name, one.tokens, one.sampling), one.name, now, state)
        if one.abort_after == 0:
            loop.abort(one.name)
        for _ in range(10_000 if alone else one.after):
            now += 1.0
            if loop.step(now) is None:
                break
    for _ in range(100_000):
        now += 1.0
        if loop.step(now) is None and not loop.unfinished:
            break
    loop.close()
    loop.audit()
    gauges = loop.scheduler.gauges()
    assert gauges["blocks_owned"] == 0, "a block leaked"
    assert gauges["state_slots_free"] == gauges["state_slots_capacity"]
    run_all.counters = dict(loop.scheduler.counters)  # type: ignore[attr-defined]
    return {
        name: (sink.tokens[name], sink.logprobs[name], end[0].finish)
        for name, end in sink.ends.items()
    }


WAYS: dict[str, dict[str, Any]] = {
    "batched": {"nextn": 0},
    "batched, drafts": {"nextn": 5},
    "overlapped": {"nextn": 0, "overlap": True},
    "overlapped, drafts": {"nextn": 5, "overlap": True},
}


def compare(seed: int, count: int) -> dict[str, dict[str, int]]:
    """Run `count` requests alone and in every way; returns what happened on each way."""
    requests = wanted(seed, count)
    oracle = run_all(requests, nextn=0, alone=True, max_num_seqs=1)
    happened: dict[str, dict[str, int]] = {}
    random = Random(seed)
    for way, options in WAYS.items():
        config = {
            "blocks": random.choice(POOLS),
            "max_num_seqs": random.choice([3, 6, 9]),
            "max_num_batched_tokens": random.choice([1, 3, 8]) * BLOCK,
            "decode_reserve_tokens": random.choice([0, 8]),
            "park_bytes": random.choice([0, 4000, 1 << 20]),
            "max_gap": random.choice([0.0, 3.5]),
            "max_queue": count,
        }
        said = run_all(requests, **options, **config)
        happened[way] = run_all.counters  # type: ignore[attr-defined]
        check_equal(requests, said, oracle, f"{way}, seed {seed}")
    return happened


def check_equal(requests: list[Wanted], said: Said, oracle: Said, way: str) -> None:
    """Who was not aborted says the same; who was says the beginning of it."""
    assert set(said) == {one.name for one in requests}
    for one in requests:
        tokens, logprobs, reason = said[one.name]
        whole, their_logprobs, their_reason = oracle[one.name]
        told = f"{way}, {one}"
        if one.abort_after is None:
            assert tokens == whole, told
            assert reason == their_reason, told
            assert logprobs == their_logprobs, told
        else:
            least = min(len(tokens), len(whole))
            assert tokens[:least] == whole[:least], told


def model_requests(seed: int, count: int, vocab: int) -> list[Wanted]:
    """As `wanted`, for a real model: prompts from few beginnings, so that forks count."""
    random = Random(seed)
    out: list[Wanted] = []
    while len(out) < count:
        shared = prompt(random.randrange(3), random.choice([0, 40, 130, 200]), vocab)
        tokens = shared + prompt(random.randrange(1 << 20), random.randint(1, 60), vocab)
        answers = random.choice([1, 1, 1, 3])
        after = random.randrange(6)
        for n in range(min(answers, count - len(out))):
            sampling = SamplingParams(
                temperature=random.choice([0.0, 0.0, 0.8, 1.2]),
                top_p=random.choice([1.0, 0.9]),
                frequency_penalty=random.choice([0.0, 0.0, 0.5]),
                seed=random.randrange(1 << 30),
                max_tokens=random.randint(1, 40),
                ignore_eos=random.random() < 0.5,
                stop_token_ids=tuple(random.sample(range(vocab), random.choice([0, 0, 20]))),
                priority=random.choice([0, 0, 0, -1, 2]),
            )
            aborted = random.randint(0, 10) if random.random() < 0.05 else None
            out.append(Wanted(f"r{len(out)}", tokens, sampling, None, aborted, 0 if n else after))
    return out
