"""The model by itself: prefill, decode, drafts, and caches that are cut, copied and closed."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokens import tokens

from deepinfer_engine import ConfigError, Model, RequestError, load_model
from deepinfer_engine.model.family import CacheQuant

LENGTH = 150
SAME = 1e-9  # float64; observed 1e-14


@pytest.fixture(scope="module", params=["reference", "none"])
def model(request: pytest.FixtureRequest, tiny_dir: Path) -> Model:
    quant: CacheQuant = request.param
    return load_model(tiny_dir, dtype="float64", cache_quant=quant)


@pytest.fixture(scope="module")
def whole(model: Model) -> torch.Tensor:
    return model.prefill(tokens(0, LENGTH))[0]


def test_prefill_equals_chunked_prefill_equals_decode(model: Model, whole: torch.Tensor) -> None:
    ids = tokens(0, LENGTH)
    assert whole.shape == (LENGTH, 320)
    assert whole.dtype == torch.float64
    held, parts = None, []
    for a, b in itertools.pairwise([0, 1, 2, 63, 129, LENGTH]):
        logits, held = model.prefill(ids[a:b], cache=held)
        parts.append(logits)
    assert (torch.cat(parts) - whole).abs().max() < SAME
    logits, held = model.prefill(ids[:1])
    steps = [logits, *(model.decode(held, [t]) for t in ids[1:].tolist())]
    assert (torch.cat(steps) - whole).abs().max() < SAME
    assert held.length == LENGTH


def test_logits_of_a_bfloat16_model_are_float32_sums(tiny_dir: Path) -> None:
    """Rounded to bfloat16 the best tokens would tie, and greedy text follow the lowest id."""
    rough = load_model(tiny_dir, dtype="bfloat16")
    logits, held = rough.prefill(tokens(0, LENGTH))
    assert logits.dtype == torch.float32
    assert (logits.bfloat16().float() != logits).float().mean() > 0.9
    assert rough._drafter is not None
    at = torch.tensor([held.length]), torch.tensor([held.slot])
    drafted = rough._drafter.run(torch.tensor([7]), *at, 5, lambda _, row: row.argmax(-1)).logits
    assert drafted.dtype == torch.float32
    assert (drafted.bfloat16().float() != drafted).float().mean() > 0.9


@settings(max_examples=20, deadline=None)
@given(at=st.integers(1, LENGTH - 6), back=st.integers(1, 5), wrong=st.integers(0, 9))
def test_truncating_equals_never_having_fed(
    model: Model, whole: torch.Tensor, at: int, back: int, wrong: int
) -> None:
    ids = tokens(0, LENGTH)
    _, held = model.prefill(ids[:at])
    model.decode(held, tokens(50 + wrong, back))
    held.truncate(at)
    assert held.length == at
    assert (model.decode(held, ids[at:]) - whole[at:]).abs().max() < SAME


def test_truncating_further_than_the_windows_remember_is_refused(model: Model) -> None:
    _, held = model.prefill(tokens(0, 40))
    held.truncate(38)
    with pytest.raises(RequestError, match=r"can go back to 35\.\.38 tokens, got 34"):
        held.truncate(34)
    with pytest.raises(RequestError, match="got 39"):
        held.truncate(39)
    held.truncate(35)


def test_several_sequences_decode_as_they_would_alone(model: Model) -> None:
    ids = [tokens(seed, 40 + 31 * seed) for seed in range(3)]
    caches = [model.prefill(one)[1] for one in ids]
    alone = [model.prefill(one)[1] for one in ids]
    nexts = np.stack([tokens(60 + i, 4) for i in range(3)])
    together = model.decode(caches, list(nexts))
    assert together.shape == (3, 4, 320)
    for i in range(3):
        assert (together[i] - model.decode(alone[i], nexts[i])).abs().max() < SAME


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_an_exported_cache_goes_on_in_another_model(tiny_dir: Path, length: int) -> None:
    ids = tokens(4, length + 5)
    first, second = (load_model(tiny_dir, dtype="float64") for _ in range(2))
    _, held = first.prefill(ids[:length])
    copy = second.new_cache()
    copy.import_blocks(held.export_blocks(), ids[:length])
    copy.import_state(held.export_state())
    assert not copy.approximate
    assert torch.equal(first.decode(held, ids[length:]), second.decode(copy, ids[length:]))


def test_a_truncated_cache_exports_the_blocks_of_its_length(model: Model) -> None:
    ids = tokens(0, 130)
    _, held = model.prefill(ids)
    held.truncate(127)
    blocks = held.export_blocks()
    assert len(blocks) == 1
    copy = model.new_cache()
    copy.import_blocks(blocks, ids[:127])
    copy.import_state(held.export_state())
    fresh = model.prefill(ids[:127])[1]
    assert (model.decode(copy, [5, 6]) - model.decode(fresh, [5, 6])).abs().max() < SAME


def test_blocks_go_into_a_cache_that_was_emptied(model: Model) -> None:
    ids = tokens(0, 127)
    cache = model.new_cache()
    cache.reserve(300)  # as after tokens that were taken back
    held = model.prefill(ids)[1]
    cache.import_blocks(held.export_blocks(), ids)
    cache.import_state(held.export_state())
    assert torch.equal(cache.export_blocks(), held.export_blocks())
    assert (model.decode(cache, [5, 6]) - model.decode(held, [5, 6])).abs().max() < SAME


def test_drafts_are_what_greedy_decoding_of_the_draft_module_gives(model: Model) -> None:
    ids = tokens(5, 140)
    caches = [model.prefill(ids[:90])[1], model.prefill(ids)[1]]
    one, both = model.draft(caches[1], 77), model.draft(caches, [42, 77])
    assert one.tokens.shape == (1, 5)
    assert one.deterministic
    assert np.array_equal(both.tokens[1], one.tokens[0])
    assert np.array_equal(model.draft(caches[1], 77, length=2).tokens[0], one.tokens[0, :2])
    assert ((one.conf > 0) & (one.conf < 1)).all()
    assert torch.equal(model.decode(caches[1], [77]), model.decode(model.prefill(ids)[1], [77]))


def test_sampled_drafts_come_from_the_laws_they_carry(tiny_dir: Path) -> None:
    m = load_model(tiny_dir, dtype="float64")
    _, held = m.prefill(tokens(6, 30))
    rng = np.random.default_rng(0)
    drawn = [m.draft(held, 9, length=1, temperature=0.7, rng=rng) for _ in range(1500)]
    law = drawn[0].q[0, 0].numpy()
    assert np.isclose(law.sum(), 1)
    counts = np.bincount([int(d.tokens[0, 0]) for d in drawn], minlength=320)
    likely = law > 0.01
    # Each likely token's count lies within 5 standard deviations; 20 of them, chance below 2e-5.
    spread = np.sqrt(1500 * law[likely] * (1 - law[likely]))
    assert (np.abs(counts[likely] - 1500 * law[likely]) < 5 * spread).all()


def test_memory_comes_back_when_a_cache_is_closed_or_dropped(tiny_dir: Path) -> None:
    m = load_model(tiny_dir, dtype="float32")
    for _ in range(3):
        kept = [m.prefill(tokens(seed, 200))[1] for seed in range(6)]
        kept[0].close()
        with pytest.raises(RequestError, match="this cache is closed"):
            m.decode(kept[0], [5])
        del kept
        gc.collect()
        size = len(m._memory.pools.blocks)
    assert size <= 18, "the pool must not grow when caches are given back"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m, c: m.prefill([]), "at least one integer"),
        (lambda m, c: m.prefill([[1, 2], [3]]), "flat list"),
        (lambda m, c: m.prefill([1.5]), "integer, got float64"),
        (lambda m, c: m.prefill([5, 320]), r"token ids are 0\.\.319, got 320"),
        (lambda m, c: m.prefill([-1]), "got -1"),
        (lambda m, c: m.prefill([5] * 1025), "at most 1024 tokens, this would make 1025"),
        (lambda m, c: m.prefill([5, 6], prompt_len=1), "prompt_len must be at least 2"),
        (lambda m, c: m.decode([c, c], [[5], [6]]), "given twice"),
        (lambda m, c: m.decode([c], [[5], [6]]), "for each of 1 caches"),
        (lambda m, c: m.draft(c, 5, length=6), r"1\.\.5"),
        (lambda m, c: m.draft(c, 5, temperature=1.0), "with rng"),
        (lambda m, c: m.draft([c], [5, 6]), "one token for each of 1 caches"),
        (lambda m, c: c.import_state(torch.zeros(3)), "import_state wants uint8"),
        (lambda m, c: c.import_state(None), "import_state wants a tensor"),
        (lambda m, c: c.truncate(2.5), "must be an integer"),
        (lambda m, c: c.import_blocks(torch.zeros(1, 3, dtype=torch.uint8), [5]), "wants uint8"),
    ],
)
def test_misuse_is_told_in_words(tiny_dir: Path, call: Any, words: str) -> None:
    m = load_model(tiny_dir)
    _, held = m.prefill([5, 6, 7])
    with pytest.raises(RequestError, match=words):
        call(m, held)


def test_blocks_without_a_state_end_at_a_border(tiny_dir: Path) -> None:
    m = load_model(tiny_dir)
    _, held = m.prefill(tokens(0, 100))
    copy = m.new_cache()
    copy.import_blocks(held.export_blocks(), tokens(0, 100))
    with pytest.raises(RequestError, match="multiple of 128"):
        m.prefill([5], cache=copy)
    with pytest.raises(RequestError, match="already holds 3 tokens"):
        m.prefill([5, 6, 7])[1].import_blocks(held.export_blocks(), tokens(0, 100))
    with pytest.raises(RequestError, match="another model"):
        load_model(tiny_dir).decode(held, [5])


def test_other_devices_are_refused(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="device must be 'cpu'"):
        load_model(tiny_dir, device="cuda")
