"""The test double must notice what it exists to notice."""

from __future__ import annotations

import numpy as np
import pytest
from toy_engine import BLOCK, alone, greedy, prompt, toy

from deepinfer_engine.core.runner import DecodeRow, PrefillChunk
from deepinfer_engine.core.types import SamplingParams

TOKENS = prompt(1, 3 * BLOCK + 2)


def feed(runner, tokens=TOKENS, *, start=0, lookback=(), table=(1, 2, 3, 4), slot=1, **options):
    chunk = PrefillChunk(
        token_ids=np.asarray(tokens[start:]),
        start=start,
        lookback=tuple(lookback),
        block_table=table,
        state_slot=slot,
        sampling=options.pop("sampling", greedy()),
        sample=options.pop("sample", True),
        **options,
    )
    return runner.prefill([chunk])[0]


def next_token(runner, table=(1, 2, 3, 4), slot=1):
    row = DecodeRow([*TOKENS, 7], len(TOKENS), table, slot, greedy(), 0)
    return runner.decode([row])[0].tokens


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.block_bytes(1).__setitem__(0, r.block_bytes(1)[0] ^ 1),
        lambda r: r.block_bytes(2).__setitem__(-1, r.block_bytes(2)[-1] ^ 1),
        lambda r: r.state_bytes(1).__setitem__(8 * len(TOKENS) - 9, 0),
        lambda r: r.clear_state(1),
        lambda r: r.block_bytes(2).__setitem__(slice(None), bytes(r.block_bytes(1))),
    ],
    ids=["bit of the first block", "last byte of a block", "state byte", "no state", "wrong block"],
)
def test_any_damage_to_blocks_or_state_changes_the_next_token(damage):
    good, bad = toy(window=40), toy(window=40)
    feed(good)
    feed(bad)
    assert next_token(good) == next_token(bad)
    feed(bad)
    damage(bad)
    assert next_token(good) != next_token(bad)


def test_a_wrong_lookback_changes_the_next_token():
    whole = feed(toy()).tokens
    for lookback, same in (([*TOKENS[:8]][-2:], True), ([1, 2], False)):
        runner = toy()
        feed(runner, TOKENS[:BLOCK], sample=False)
        split = feed(runner, start=BLOCK, lookback=lookback).tokens
        assert (split == whole) is same


def test_swapped_blocks_change_the_next_token():
    good, bad = toy(), toy()
    feed(good)
    feed(bad)
    assert next_token(good) != next_token(bad, table=(2, 1, 3, 4))


def test_a_snapshot_continues_as_if_only_its_tokens_had_been_fed():
    runner = toy()
    whole = feed(runner, snapshots=((BLOCK, 5), (3 * BLOCK, 6)))
    again = toy()
    for source, target in ((1, 1), (2, 2), (3, 3)):
        again.block_bytes(target)[:] = runner.block_bytes(source)
    again.state_bytes(1)[:] = runner.state_bytes(6)
    rest = feed(again, start=3 * BLOCK, lookback=TOKENS[3 * BLOCK - 2 : 3 * BLOCK])
    assert rest == whole


def test_some_drafts_are_wrong_and_most_are_right():
    drafted = accepted = 0
    for i in range(20):
        runner = toy(nextn=5)
        feed(runner, prompt(i, 20), table=range(1, 8))
        history = [*prompt(i, 20), 1]
        for _ in range(10):
            step = runner.decode([DecodeRow(history, 20, range(1, 50), 1, greedy(), 1)])[0]
            drafted, accepted = drafted + step.n_drafted, accepted + step.n_accepted
            assert len(step.tokens) == step.n_accepted + 1
            history += step.tokens
    assert 0.6 < accepted / drafted < 0.9


def test_the_seed_matters_only_with_a_temperature():
    tokens = prompt(3, 10)

    def said(temperature, seed):
        return alone(tokens, SamplingParams(temperature=temperature, seed=seed, max_tokens=8))

    assert said(0.0, 1) == said(0.0, 2)
    assert said(1.0, 1) == said(1.0, 1) != said(1.0, 2)


def test_two_steps_at_a_time_are_refused():
    runner = toy()
    with runner._alone(), pytest.raises(RuntimeError, match="thread-safe"):
        feed(runner)
