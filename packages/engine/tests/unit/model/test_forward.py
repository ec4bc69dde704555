"""The cached runtime: however a sequence is cut into passes, the logits are the same; and they are
the twin's."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_engine.model.family import CacheQuant
from deepinfer_engine.model.runner import TorchRunner, build_runner
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.batch import Batch

LENGTH = 150
TOLERANCE = 1e-10  # float64; observed 1e-14


def runner(tiny_dir: Path, quant: CacheQuant = "reference", dtype: str = "float64") -> TorchRunner:
    return build_runner(tiny_dir, dtype=dtype, num_blocks=12, num_state_slots=6, cache_quant=quant)


def tokens(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, size=length)


def rows(
    ids: np.ndarray, start: int, end: int, slot: int, blocks: list[int], snapshots=()
) -> SequenceRows:
    return SequenceRows(
        ids[start:end],
        start,
        tuple(ids[max(0, start - 3) : start].tolist()),
        blocks,
        slot,
        tuple(snapshots),
    )


def feed(model: TorchRunner, *sequences: SequenceRows) -> list[torch.Tensor]:
    """Logits of every row, split by sequence."""
    batch = Batch(model.model._text, list(sequences))
    return list(
        model.model._backbone.forward(batch, None).split([len(s.token_ids) for s in sequences])
    )


def in_pieces(
    model: TorchRunner, ids: np.ndarray, cuts: list[int], slot: int = 1, blocks=(2, 3)
) -> torch.Tensor:
    edges = [0, *sorted(set(cuts)), len(ids)]
    return torch.cat(
        [
            feed(model, rows(ids, a, b, slot, list(blocks)))[0]
            for a, b in itertools.pairwise(edges)
            if b > a
        ]
    )


@pytest.fixture(scope="module")
def whole(tiny_dir: Path) -> dict[CacheQuant, torch.Tensor]:
    return {
        quant: feed(runner(tiny_dir, quant), rows(tokens(0), 0, LENGTH, 1, [2, 3]))[0]
        for quant in ("reference", "none")
    }


@pytest.mark.parametrize("quant", ["reference", "none"])
def test_token_by_token_equals_one_pass(tiny_dir: Path, whole: dict, quant: CacheQuant) -> None:
    alone = in_pieces(runner(tiny_dir, quant), tokens(0), list(range(LENGTH)))
    assert (alone - whole[quant]).abs().max() < TOLERANCE


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), max_size=8))
def test_any_chunking_equals_one_pass(tiny_dir: Path, whole: dict, cuts: list[int]) -> None:
    pieces = in_pieces(runner(tiny_dir), tokens(0), cuts)
    assert (pieces - whole["reference"]).abs().max() < TOLERANCE


def test_sequences_of_a_batch_do_not_see_each_other(tiny_dir: Path, whole: dict) -> None:
    model = runner(tiny_dir)
    other = tokens(1)
    feed(model, rows(tokens(0), 0, 70, 1, [2, 3]), rows(other, 0, 31, 2, [4]))
    first, second = feed(model, rows(tokens(0), 70, LENGTH, 1, [2, 3]), rows(other, 31, 36, 2, [4]))
    assert (first - whole["reference"][70:]).abs().max() < TOLERANCE
    alone = in_pieces(runner(tiny_dir), other[:36], [])
    assert (second - alone[31:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("rejected", [1, 2, 5])
@pytest.mark.parametrize("kept", [61, 64, 127, 128])
def test_rejected_tokens_leave_no_trace(
    tiny_dir: Path, whole: dict, kept: int, rejected: int
) -> None:
    model = runner(tiny_dir)
    in_pieces(model, tokens(0)[:kept], [kept - 7])
    wrong = np.concatenate([tokens(0)[:kept], tokens(7, rejected)])
    feed(model, rows(wrong, kept, kept + rejected, 1, [2, 3]))
    after = feed(model, rows(tokens(0), kept, LENGTH, 1, [2, 3]))[0]
    assert (after - whole["reference"][kept:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("start", [0, 1, 100, 127])
def test_a_snapshot_taken_inside_a_chunk_continues_like_the_original(
    tiny_dir: Path, whole: dict, start: int
) -> None:
    model, elsewhere = runner(tiny_dir), runner(tiny_dir)
    if start:
        feed(model, rows(tokens(0), 0, start, 1, [2, 3]))
    feed(model, rows(tokens(0), start, LENGTH, 1, [2, 3], snapshots=[(128, 4)]))
    elsewhere.block_bytes(5)[:] = model.block_bytes(2)
    elsewhere.state_bytes(3)[:] = model.state_bytes(4)
    after = feed(elsewhere, rows(tokens(0), 128, LENGTH, 3, [5, 6]))[0]
    assert (after - whole["reference"][128:]).abs().max() < TOLERANCE


def test_packed_records_hold_exactly_what_the_rounding_gave(tiny_dir: Path) -> None:
    """float32 stores FP8 and FP4 bytes; cut anywhere, what is read back is what one pass computed
    with."""
    one = feed(runner(tiny_dir, dtype="float32"), rows(tokens(0), 0, LENGTH, 1, [2, 3]))[0]
    cut = in_pieces(runner(tiny_dir, dtype="float32"), tokens(0), [40, 41, 99])
    assert (one - cut).abs().median() < 1e-5
    assert (one - cut).abs().mean() < 0.05


@pytest.mark.parametrize("quant", ["reference", "none"])
def test_logits_equal_the_dense_twin(
    tiny_dir: Path, whole: dict, twin: ModuleType, quant: CacheQuant
) -> None:
    dense = twin.load_twin(tiny_dir, torch.float64)
    with torch.no_grad():
        expected = dense(torch.from_numpy(tokens(0))[None], quant)[0]
    assert (whole[quant] - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 3, 17, 40])
def test_short_prompts_equal_the_dense_twin(tiny_dir: Path, twin: ModuleType, length: int) -> None:
    got = feed(runner(tiny_dir), rows(tokens(3), 0, length, 1, [2]))[0]
    with torch.no_grad():
        expected = twin.load_twin(tiny_dir, torch.float64)(
            torch.from_numpy(tokens(3)[:length])[None]
        )[0]
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("resident", [3, 20, 140])
def test_drafts_equal_the_dense_twin_whatever_lies_beyond_in_the_ring(
    tiny_dir: Path, twin: ModuleType, resident: int
) -> None:
    model = runner(tiny_dir)
    ids = tokens(0)
    feed(model, rows(ids, 0, resident, 1, [2, 3]))
    # Rejected rows of an earlier round sit in the slots behind the last accepted position.
    feed(
        model,
        rows(np.concatenate([ids[:resident], tokens(9, 5)]), resident, resident + 5, 1, [2, 3]),
    )
    assert model.model._drafts._drafter is not None
    block = model.model._drafts._drafter.run(
        torch.tensor([77]),
        torch.tensor([resident]),
        torch.tensor([1]),
        5,
        lambda _, logits: logits.argmax(-1),
    )
    dense = twin.load_twin(tiny_dir, torch.float64)
    drafts, logits, confidence = dense.draft(
        torch.from_numpy(ids[:resident])[None], torch.tensor([77])
    )
    assert torch.equal(block.tokens, drafts)
    assert (block.logits - logits).abs().max() < TOLERANCE
    assert (block.confidence - confidence).abs().max() < TOLERANCE
