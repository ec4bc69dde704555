"""Bounded replay: what it leaves exact, what it approximates, and how it is refused."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokens import tokens

from deepinfer_engine import (
    LLM,
    Cache,
    Completion,
    ConfigError,
    Model,
    SamplingParams,
    load_model,
)
from deepinfer_engine.core.runner import Caps
from deepinfer_engine.model.family import ReplayMode

LENGTH = 150
KEEP = 30  # more than window 16 + 6
EXACT = 1e-12


@cache
def model(path: Path, mode: str, keep: int | None = KEEP) -> Model:
    return load_model(path, dtype="float64", replay=mode, keep=keep if mode != "off" else None)


def fed(m: Model, ids: np.ndarray, cuts: list[int]) -> tuple[torch.Tensor, Cache]:
    """Logits of the last chunk, and the cache."""
    held, logits = None, torch.empty(0)
    for a, b in itertools.pairwise([0, *sorted(set(cuts)), len(ids)]):
        logits, held = m.prefill(ids[a:b], cache=held, prompt_len=len(ids))
    assert held is not None
    return logits, held


@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=5), seed=st.integers(0, 3))
def test_dropping_rows_equals_masking_them_however_the_prompt_is_cut(
    tiny_dir: Path, cuts: list[int], seed: int
) -> None:
    ids = tokens(seed, LENGTH)
    masked, m_cache = fed(model(tiny_dir, "mask"), ids, [])
    compact, c_cache = fed(model(tiny_dir, "compact"), ids, cuts)
    rows = min(len(compact), KEEP)
    assert (compact[-rows:] - masked[-rows:]).abs().max() < EXACT
    then = ids[:7].tolist()
    after = [
        m.decode(c, then)
        for m, c in (
            (model(tiny_dir, "mask"), m_cache),
            (model(tiny_dir, "compact"), c_cache),
        )
    ]
    assert (after[0] - after[1]).abs().max() < EXACT
    guesses = [
        m.draft(c, 9)
        for m, c in (
            (model(tiny_dir, "mask"), m_cache),
            (model(tiny_dir, "compact"), c_cache),
        )
    ]
    assert np.array_equal(guesses[0].tokens, guesses[1].tokens)


@pytest.mark.parametrize("mode", ["mask", "compact"])
@pytest.mark.parametrize("cuts", [[], [64], [3, 119, 121, 149]])
def test_compressed_entries_are_those_of_the_exact_pass(
    tiny_dir: Path, mode: str, cuts: list[int]
) -> None:
    ids = tokens(0, LENGTH)
    _, exact = fed(model(tiny_dir, "off"), ids, cuts)
    _, bounded = fed(model(tiny_dir, mode), ids, cuts)
    assert torch.equal(bounded.export_blocks(), exact.export_blocks())


def test_masked_windows_equal_the_dense_twin_with_the_same_mask(
    tiny_dir: Path, twin: ModuleType
) -> None:
    """The twin knows nothing of replay: its consumer layers get a window that starts at `rect`."""
    ids, rect = tokens(0, LENGTH), LENGTH - KEEP
    dense = twin.load_twin(tiny_dir, torch.float64)
    calls = itertools.count()

    def attend(q, local, entries, chosen, sink, W):
        t = torch.arange(q.shape[1])
        seen = (t[None, :] <= t[:, None]) & (t[None, :] > t[:, None] - W)
        if next(calls) >= 6:
            seen &= t[None, :] >= rect
        keys, mask = local, seen.expand(q.shape[0], -1, -1)
        if entries is not None:
            keys, mask = torch.cat((local, entries), 1), torch.cat((mask, chosen), -1)
        return twin.attend_block(q, keys, mask, sink)

    dense.ops = twin.Ops(attend=attend)
    with torch.no_grad():
        expected = dense(torch.from_numpy(ids)[None])[0]
    got, _ = fed(model(tiny_dir, "mask"), ids, [])
    assert next(calls) == 10
    assert (got - expected).abs().max() < 1e-10
    exact, _ = fed(model(tiny_dir, "off"), ids, [])
    assert (got - exact)[-KEEP:].abs().max() > 1e-3, "replay approximates; the test must see that"


@pytest.mark.parametrize("length", [1, 22, KEEP])
@pytest.mark.parametrize("mode", ["mask", "compact"])
def test_prompts_no_longer_than_keep_are_exact(tiny_dir: Path, mode: str, length: int) -> None:
    ids = tokens(2, length)
    exact, _ = fed(model(tiny_dir, "off"), ids, [])
    bounded, _ = fed(model(tiny_dir, mode), ids, [])
    assert torch.equal(exact, bounded)


def test_compact_returns_the_rows_that_ran_and_one_of_every_chunk(tiny_dir: Path) -> None:
    m, ids = model(tiny_dir, "compact"), tokens(0, LENGTH)
    logits, held = m.prefill(ids[:40], prompt_len=LENGTH)
    assert len(logits) == 1
    logits, held = m.prefill(ids[40:125], cache=held, prompt_len=LENGTH)
    assert len(logits) == 5
    logits, held = m.prefill(ids[125:], cache=held)
    assert len(logits) == 25


def test_a_batch_in_which_one_prompt_is_bounded_leaves_the_others_exact(tiny_dir: Path) -> None:
    from deepinfer_engine.model.sequence_rows import SequenceRows
    from deepinfer_engine.model.v41.batch import Batch

    m = model(tiny_dir, "compact")
    long, short = tokens(0, LENGTH), tokens(1, 20)
    pools = m._memory.pools
    pools.grow(20, 8)
    rows = [
        SequenceRows(short, 0, (), [15], 6),
        SequenceRows(long, 0, (), [16, 17], 7, replay_from=LENGTH - KEEP),
    ]
    logits = m._backbone.forward(Batch(m._text, rows), torch.tensor([0, 19, 20 + LENGTH - 1]))
    alone_short, _ = fed(m, short, [])
    alone_long, _ = fed(m, long, [])
    expected = torch.stack([alone_short[0], alone_short[19], alone_long[-1]])
    assert (logits - expected).abs().max() < EXACT


def test_a_keep_that_decoding_would_read_past_is_refused(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be at least 22 for this model"):
        load_model(tiny_dir, replay="compact", keep=21)
    with pytest.raises(ConfigError, match="replay must be 'off', 'mask' or 'compact'"):
        load_model(tiny_dir, replay="some")  # type: ignore[arg-type]
    assert load_model(tiny_dir, replay="compact").replay.keep == 22


# -- encoder-side replay: blocks are there, windows are not ----------------------------------------


def resumed(m: Model, ids: np.ndarray, hit: int) -> Cache:
    """A new cache with the blocks of `ids[:hit]` and no state."""
    _, whole = fed(m, ids[:hit], [])
    again = m.new_cache()
    again.import_blocks(whole.export_blocks(), ids[:hit])
    return again


def test_a_lost_window_that_reaches_back_to_the_start_is_rebuilt_exactly(
    wide_dir: Path,
) -> None:
    m, ids = model(wide_dir, "off"), tokens(0, LENGTH)
    expected, _ = fed(m, ids, [])
    again = resumed(m, ids, 128)
    got, _ = m.prefill(ids[128:], cache=again)
    assert (got - expected[128:]).abs().max() < EXACT
    assert again.approximate


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_a_lost_window_is_approximated_and_stored_entries_stay(tiny_dir: Path, mode: str) -> None:
    m, ids = model(tiny_dir, mode), tokens(0, LENGTH)
    again = resumed(m, ids, 128)
    before = again.export_blocks()
    logits, _ = m.prefill(ids[128:], cache=again, prompt_len=LENGTH)
    assert torch.equal(again.export_blocks()[:1], before)
    expected, _ = fed(m, ids, [128])
    difference = (logits - expected[-len(logits) :]).abs().max()
    assert 1e-6 < difference < 20
    assert torch.isfinite(logits).all()
    cut = resumed(m, ids, 128)
    m.prefill(ids[128:131], cache=cut, prompt_len=LENGTH)
    later, _ = m.prefill(ids[131:], cache=cut)
    rows = min(len(later), len(logits))
    assert (later[-rows:] - logits[-rows:]).abs().max() < EXACT


def test_a_lost_window_is_empty_whatever_bytes_its_slot_holds(tiny_dir: Path) -> None:
    """Not zeros that would draw weight in the softmax, and nothing of an earlier owner."""
    m, ids = model(tiny_dir, "off"), tokens(0, LENGTH)
    clean, used = resumed(m, ids, 128), resumed(m, ids, 128)
    _, other = fed(m, tokens(9, 140), [])
    m._memory.pools.states[used.slot] = other.export_state()
    expected, _ = m.prefill(ids[128:], cache=clean)
    got, _ = m.prefill(ids[128:], cache=used)
    assert torch.equal(got, expected)


def test_decoding_on_blocks_alone_runs_the_window_again_too(tiny_dir: Path) -> None:
    m, ids = model(tiny_dir, "off"), tokens(0, LENGTH)
    by_prefill, _ = m.prefill(ids[128:130], cache=resumed(m, ids, 128))
    by_decode = m.decode(resumed(m, ids, 128), ids[128:130])
    assert (by_prefill - by_decode).abs().max() < EXACT


# -- in the engine ---------------------------------------------------------------------------------


def test_served_prompts_are_bounded_stored_and_hit(tiny_dir: Path, tmp_path: Path) -> None:
    """keep is 22 + 128: of 400 tokens only the border at 384 has a whole window to store."""
    ids = tokens(3, 400)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def answer(replay: ReplayMode) -> Completion:
        with LLM(tiny_dir, dtype="float64", replay=replay, cache_dir=tmp_path) as llm:
            (done,) = llm.generate([ids.tolist()], params)
        return done

    first, second = answer("compact"), answer("compact")
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 384)
    assert first.token_ids == second.token_ids
    m = load_model(tiny_dir, dtype="float64", replay="compact", keep=150)
    logits, held = m.prefill(ids)
    expected = [int(logits[-1].argmax())]
    while len(expected) < 12:
        expected.append(int(m.decode(held, expected[-1:])[0].argmax()))
    assert list(first.token_ids) == expected
    assert answer("off").usage.cached_tokens == 0, "exact and bounded states are never mixed"
    assert answer("off").usage.cached_tokens == 384


@pytest.mark.parametrize("max_batched", [128, 200])
def test_bounded_prompts_in_several_steps_say_the_same(tiny_dir: Path, max_batched: int) -> None:
    from deepinfer_engine.core.runner import PrefillChunk
    from deepinfer_engine.model.runner import build_runner

    ids = tokens(5, 500)
    runner = build_runner(
        tiny_dir, dtype="float64", num_blocks=8, num_state_slots=3, replay="compact"
    )
    output = None
    for start in range(0, len(ids), max_batched):
        end = min(start + max_batched, len(ids))
        chunk = PrefillChunk(
            ids[start:end],
            start,
            tuple(ids[max(0, start - 3) : start].tolist()),
            [1, 2, 3, 4],
            1,
            SamplingParams(temperature=0.0),
            sample=end == len(ids),
            prompt_len=len(ids),
            prompt=ids.tolist(),
        )
        (output,) = runner.prefill([chunk])
    assert output is not None
    logits, _ = load_model(tiny_dir, dtype="float64", replay="compact", keep=150).prefill(ids)
    assert output.tokens == (int(logits[-1].argmax()),)


@pytest.mark.parametrize(("prompt", "first"), [(1, 0), (150, 0), (151, 1 + 16), (400, 250 + 16)])
def test_states_are_stored_from_where_their_windows_are_whole(prompt: int, first: int) -> None:
    caps = Caps(320, 1024, 5, 3, 1, 8, 3, replay_keep=150, window=16)
    assert caps.snapshot_from(prompt) == first
    assert Caps(320, 1024, 5, 3, 1, 8, 3, window=16).snapshot_from(prompt) == 0
