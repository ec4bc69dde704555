"""The runner: prompts in, tokens out; speculation, batching and chunking change nothing about
greedy text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from deepinfer_engine.core.runner import DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.runner import TorchRunner, build_runner

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


def build(tiny_dir: Path, nextn: int | None = None, dtype: str = "float64") -> TorchRunner:
    return build_runner(tiny_dir, dtype=dtype, nextn=nextn, num_blocks=20, num_state_slots=8)


class Running:
    """One running request, driven by hand."""

    def __init__(
        self, prompt: list[int], params: SamplingParams, slot: int, blocks: Sequence[int]
    ) -> None:
        self.history, self.prompt_len, self.params = list(prompt), len(prompt), params
        self.slot, self.blocks = slot, list(blocks)
        self.outputs: list[StepOutput] = []

    def chunk(self, start: int, end: int) -> PrefillChunk:
        return PrefillChunk(
            token_ids=np.array(self.history[start:end]),
            start=start,
            lookback=tuple(self.history[max(0, start - 3) : start]),
            block_table=self.blocks,
            state_slot=self.slot,
            sampling=self.params,
            sample=end == self.prompt_len,
            prompt=self.history,
        )

    def row(self, nextn: int) -> DecodeRow:
        left = self.params.max_tokens - (len(self.history) - self.prompt_len)
        return DecodeRow(
            history=list(self.history),
            prompt_len=self.prompt_len,
            block_table=self.blocks,
            state_slot=self.slot,
            sampling=self.params,
            max_draft=max(0, min(nextn, left - 1)),
        )

    def take(self, output: StepOutput) -> None:
        self.history.extend(output.tokens)
        self.outputs.append(output)

    @property
    def done(self) -> bool:
        return len(self.history) - self.prompt_len >= self.params.max_tokens

    @property
    def text(self) -> list[int]:
        return self.history[self.prompt_len :]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(4, 320, size=length).tolist()


def run(model: TorchRunner, *sequences: Running) -> list[list[int]]:
    """Prefill one by one, decode together."""
    for s in sequences:
        model.clear_state(s.slot)
        (first,) = model.prefill([s.chunk(0, s.prompt_len)])
        assert first is not None
        s.take(first)
    while running := [s for s in sequences if not s.done]:
        for s, output in zip(
            running, model.decode([s.row(model.caps.nextn) for s in running]), strict=True
        ):
            s.take(output)
    return [s.text for s in sequences]


def test_greedy_text_is_the_same_with_and_without_speculation(tiny_dir: Path) -> None:
    for seed in range(2):
        with_drafts = Running(prompt(seed, 130), GREEDY, 1, [2, 3])
        without = Running(prompt(seed, 130), GREEDY, 1, [2, 3])
        assert run(build(tiny_dir), with_drafts) == run(build(tiny_dir, nextn=0), without)
        assert sum(o.n_drafted for o in with_drafts.outputs) > 0
        assert all(len(o.tokens) == 1 for o in without.outputs)


def test_a_batch_gives_every_request_the_text_it_gets_alone(tiny_dir: Path) -> None:
    def requests() -> list[Running]:
        return [
            Running(prompt(s, 20 + 37 * s), GREEDY, 1 + s, [2 + 3 * s, 3 + 3 * s]) for s in range(3)
        ]

    model = build(tiny_dir)
    together = run(model, *requests())
    assert together == [run(model, s)[0] for s in requests()]


def test_sampled_text_depends_on_the_seed_and_not_on_company(tiny_dir: Path) -> None:
    def request(seed: int) -> Running:
        return Running(
            prompt(1, 60),
            SamplingParams(temperature=0.9, seed=seed, max_tokens=30, ignore_eos=True),
            1 + seed,
            [2 + seed],
        )

    model = build(tiny_dir)
    one, two = run(model, request(1), request(2))
    assert one != two
    assert run(model, request(1))[0] == one


def test_chunks_of_several_prompts_share_a_step(tiny_dir: Path) -> None:
    model = build(tiny_dir)
    a, b = Running(prompt(5, 90), GREEDY, 1, [2]), Running(prompt(6, 40), GREEDY, 2, [3])
    nothing, first_b = model.prefill([a.chunk(0, 50), b.chunk(0, 40)])
    assert nothing is None
    assert first_b is not None
    (first_a,) = model.prefill([a.chunk(50, 90)])
    assert first_a is not None
    alone = [
        run(model, Running(prompt(s, n), GREEDY, 4, [7, 8]))[0][0] for s, n in ((5, 90), (6, 40))
    ]
    assert [first_a.tokens[0], first_b.tokens[0]] == alone


def test_logprobs_penalties_bans_and_min_tokens_reach_the_sampler(tiny_dir: Path) -> None:
    model = build(tiny_dir)
    favourite = run(model, Running(prompt(1, 30), GREEDY, 1, [2]))[0][0]
    banned = SamplingParams(
        temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias=((favourite, -100.0),)
    )
    assert favourite not in run(model, Running(prompt(1, 30), banned, 1, [2]))[0]

    ends_at_once = SamplingParams(
        temperature=0.0, max_tokens=30, stop_token_ids=(favourite,), min_tokens=8
    )
    text = run(model, Running(prompt(1, 30), ends_at_once, 1, [2]))[0]
    assert favourite not in text[:8]

    asked = Running(
        prompt(1, 30),
        SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3),
        1,
        [2],
    )
    run(model, asked)
    for output in asked.outputs:
        assert [p.token for p in output.logprobs] == list(output.tokens)
        for p in output.logprobs:
            assert p.top[0] == (p.token, pytest.approx(p.logprob))
            assert [lp for _, lp in p.top] == sorted((lp for _, lp in p.top), reverse=True)

    no_repeats = SamplingParams(
        temperature=0.0,
        max_tokens=30,
        ignore_eos=True,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        repetition_penalty=5.0,
    )
    text = run(model, Running(prompt(1, 30), no_repeats, 1, [2]))[0]
    assert len(set(text)) == len(text)


def test_a_slot_is_clean_for_its_next_owner(tiny_dir: Path) -> None:
    model = build(tiny_dir)
    fresh = run(model, Running(prompt(2, 50), GREEDY, 1, [2]))[0]
    run(model, Running(prompt(3, 120), GREEDY, 1, [2, 4]))
    assert run(model, Running(prompt(2, 50), GREEDY, 1, [2]))[0] == fresh
    model.clear_state(1)
    assert not any(bytes(model.state_bytes(1)))


def test_layouts_of_different_formats_do_not_match(tiny_dir: Path) -> None:
    hashes = {
        build_runner(
            tiny_dir, dtype=d, num_blocks=2, num_state_slots=2, cache_quant=q
        ).layout.layout_hash
        for d in ("float32", "float64", "bfloat16")
        for q in ("reference", "none")
    }
    assert len(hashes) == 6
    assert build(tiny_dir).layout == build(tiny_dir).layout
