"""What comes out of the engine's own path is distributed as the target model says.

The whole of it runs: queue, scheduler, prompt chunks, drafts, verification, stops. The model is a
table of probabilities by the last token, the drafter another one. Two proofs: exact, by going
through every value of every uniform that is drawn (the probabilities are multiples of 1/4, so four
values stand for all), and by chi-square over many seeds where there is too much to go through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from toy_engine import Recorder, hand_loop, request

from deepinfer_engine.adapters.dspark import Proposal, sample_drafts
from deepinfer_engine.core.device import CPU
from deepinfer_engine.core.runner import CacheLayout, Caps
from deepinfer_engine.core.types import SamplingParams
from deepinfer_engine.model.runner import TorchRunner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.speculation import StepTimes, between

TARGET = np.array([[2, 1, 1], [1, 1, 2], [1, 2, 1]]) / 4
"""Row: the last token. Column: the next one."""
DRAFT = np.array([[1, 2, 1], [1, 1, 2], [2, 1, 1]]) / 4
FREE = StepTimes(between((1, 512), (1.0, 1.0)), between((1, 64), (1e-6, 1e-6)))
PROMPT = (0,)


class Table:
    """`LoadedModel` of a Markov chain, with a drafter of another one."""

    def __init__(self, target: np.ndarray, draft: np.ndarray, gamma: int) -> None:
        self._target = torch.from_numpy(np.log(target))
        self._draft = torch.from_numpy(np.log(draft))
        self.most = gamma
        self.drafts = self
        self.layout = CacheLayout(128, 8, 0, (), (), "table")
        self.lookback = self.window = self.window_rows = self.window_layers = self.replay_keep = 0
        self.blocks = torch.zeros(128, 8, dtype=torch.uint8)
        self.states = torch.zeros(1, 0, dtype=torch.uint8)

    def rows_of(self, chunk):
        return SequenceRows(chunk.token_ids, chunk.start, (), chunk.block_table, 0)

    def forward(self, rows, logit_rows):
        logits = self._target[torch.from_numpy(np.concatenate([r.token_ids for r in rows]))]
        return logits if logit_rows is None else logits[logit_rows]

    def propose(self, rows, lens, length, sampling, rng):
        last = torch.tensor([r.history[-1] for r in rows])
        tokens, laws = [], []
        for offset in range(length):
            drawn, law = sample_drafts(self._draft[last], sampling, sampling.positions, offset, rng)
            last = torch.from_numpy(np.asarray(drawn, dtype=np.int64))
            tokens.append(last.numpy())
            laws.append(law)
        drawn_from = (sampling.temperature > 0) & (
            True if sampling.coupled is None else ~sampling.coupled
        )
        q = torch.stack(laws, dim=1) if drawn_from.any() else None
        return Proposal(np.stack(tokens, axis=1), lens, q, None)


def engine(model: Table, **config):
    vocab = len(model._target)
    caps = Caps(vocab, 512, model.most, 0, (vocab - 1,), 128, 1)
    runner = TorchRunner(model, caps, CPU, FREE)  # type: ignore[arg-type]
    loop, sink = hand_loop(runner, **config)  # type: ignore[arg-type]
    return runner, loop, sink


def run_all(loop, sink: Recorder, samplings: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    for i, sampling in enumerate(samplings):
        loop.submit(request(f"r{i}", PROMPT, sampling), f"r{i}", 0.0)
    while loop.unfinished:
        loop.step(0.0)
    loop.close()
    return [tuple(sink.tokens[f"r{i}"]) for i in range(len(samplings))]


def exact_law(table: np.ndarray, length: int, end: int | None) -> dict[tuple[int, ...], float]:
    """The distribution of a whole text by the target alone."""
    law: dict[tuple[int, ...], float] = {}

    def go(text: tuple[int, ...], mass: float) -> None:
        if len(text) == length or (text and text[-1] == end):
            law[text] = mass
            return
        last = text[-1] if text else PROMPT[-1]
        for token, p in enumerate(table[last]):
            go((*text, token), mass * float(p))

    go((), 1.0)
    return law


Uniforms = Callable[[str, int], float]


def every_outcome(
    play: Callable[[Sequence[Uniforms]], Sequence[tuple[int, ...]]], batch: int
) -> Counter[tuple[int, ...]]:
    """(text, probability) over all uniforms that are asked for, four values of each.

    `play` answers a batch of requests, each of which has uniforms of its own, by purpose and key.
    """
    law: Counter[tuple[int, ...]] = Counter()
    todo: list[dict[tuple[str, int], int]] = [{}]
    while todo:
        heads, todo = todo[-batch:], todo[:-batch]
        paths = [dict(head) for head in heads]

        def uniform(path: dict[tuple[str, int], int], purpose: str, key: int) -> float:
            return (path.setdefault((purpose, key), 0) + 0.5) / 4

        texts = play([partial(uniform, path) for path in paths])
        for head, path, text in zip(heads, paths, texts, strict=True):
            # What the head does not tell took value 0; the other three are to be followed. What a
            # batch asks for and does not use shares its mass out evenly.
            law[text] += 4.0 ** -len(path)
            followed = dict(head)
            for asked in list(path)[len(head) :]:
                todo += [{**followed, asked: value} for value in (1, 2, 3)]
                followed[asked] = 0
    return law


@pytest.mark.parametrize(
    ("gamma", "ignore_eos", "batch"),
    [
        (1, True, 64),
        (1, False, 64),
        # How many of two drafts are verified is a matter of the whole batch: one at a time.
        pytest.param(2, True, 1, marks=pytest.mark.slow),
    ],
)
def test_by_enumeration_the_law_is_that_of_the_target(gamma, ignore_eos, batch):
    length = 3
    drafted = 0

    def play(uniforms: Sequence[Uniforms]) -> list[tuple[int, ...]]:
        nonlocal drafted
        runner, loop, sink = engine(Table(TARGET, DRAFT, gamma), max_num_seqs=batch)
        each = np.frompyfunc(lambda name, seed, key: uniforms[int(seed)](name, int(key)), 3, 1)
        runner._sampler.rng = lambda *asked: each(*asked).astype(float)
        texts = run_all(loop, sink, [
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=length, ignore_eos=ignore_eos, coupled=False
            )
            for seed in range(len(uniforms))
        ])  # fmt: skip
        drafted += loop.scheduler.counters["accepted_tokens"]
        return texts

    found = every_outcome(play, batch)
    wanted = exact_law(TARGET, length, None if ignore_eos else 2)
    assert drafted, "drafts were accepted"
    assert set(found) == set(wanted)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    for text, mass in wanted.items():
        assert found[text] == pytest.approx(mass, abs=1e-12), text


def chi_square(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    n = sum(seen.values())
    return sum((seen[text] - n * p) ** 2 / (n * p) for text, p in law.items())


DRAWS = 4_000
SKEWED = np.array([[8, 4, 2, 2], [1, 5, 5, 5], [3, 3, 9, 1], [4, 4, 4, 4]]) / 16
GUESSED = np.array([[5, 5, 5, 1], [4, 4, 4, 4], [1, 1, 13, 1], [2, 2, 6, 6]]) / 16
LIMIT = 37.7
"""Of chi-square with 15 degrees of freedom at 0.1%. With 4,000 texts in 16 cells an error of three
points in a cell of a sixteenth adds 58 on the mean, and is found 98 times in 100."""


def drawn(coupled: bool, overlap: bool, table: np.ndarray = SKEWED) -> Counter[tuple[int, ...]]:
    seen: Counter[tuple[int, ...]] = Counter()
    for part in range(0, DRAWS, 400):
        _, loop, sink = engine(
            Table(table, GUESSED, 3), max_num_seqs=100, max_queue=400, overlap=overlap
        )
        samplings = [
            SamplingParams(
                temperature=1.0, seed=part + i, max_tokens=3, ignore_eos=True, coupled=coupled
            )
            for i in range(400)
        ]
        seen.update(text[1:] for text in run_all(loop, sink, samplings))
    return seen


def second_law(table: np.ndarray) -> dict[tuple[int, ...], float]:
    """Of the second and third token: those that drafts had a part in."""
    law: Counter[tuple[int, ...]] = Counter()
    for text, mass in exact_law(table, 3, None).items():
        law[text[1:]] += mass
    return dict(law)


@pytest.mark.parametrize(
    ("coupled", "overlap"),
    [(True, False), (False, False), (False, True)],
    ids=["coupled", "rejection", "rejection, overlapped"],
)
def test_by_chi_square_the_law_is_that_of_the_target(coupled, overlap):
    assert chi_square(drawn(coupled, overlap), second_law(SKEWED)) < LIMIT


def test_the_test_finds_a_law_that_is_a_little_off():
    wrong = SKEWED.copy()
    wrong[1] = np.array([2, 4, 5, 5]) / 16  # one row, by a sixteenth
    assert chi_square(drawn(True, False, wrong), second_law(SKEWED)) > LIMIT


def test_the_seed_decides_and_neither_batch_nor_drafts_do():
    """In the coupled mode; asked of requests that choose it and of the engine's default."""
    texts = {}
    for gamma, seqs, overlap, coupled in (
        (1, 1, False, True), (3, 7, False, None), (3, 7, True, True), (1, 7, True, None),
    ):  # fmt: skip
        _, loop, sink = engine(Table(SKEWED, GUESSED, gamma), max_num_seqs=seqs, overlap=overlap)
        samplings = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True, coupled=coupled)
            for i in range(12)
        ]
        texts[gamma, seqs, overlap, coupled] = run_all(loop, sink, samplings)
    first = next(iter(texts.values()))
    assert all(other == first for other in texts.values())
