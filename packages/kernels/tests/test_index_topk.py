"""`index_topk` equals its steps; its work is the sum of the sequences' own, in bounded pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kernels import ops
from deepinfer_kernels.draw import seeded
from deepinfer_kernels.ops.index_topk import reference
from deepinfer_kernels.ops.index_topk.spec import SPEC
from deepinfer_kernels.registry import default_registry, use

BACKENDS = [
    name
    for name, impl in default_registry.impls("index_topk").items()
    if name != "triton" and impl.unavailable() is None
]


def by_steps(args: tuple[Any, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """(entries, runs) of each row, out of the operators for one padded matrix of scores."""
    q, w, cache, table, first, visible, record, k, entries, block, blocks, within = args
    chosen, kept = [], []
    for s, (low, high) in enumerate(zip(first[:-1].tolist(), first[1:].tolist(), strict=True)):
        for row in range(low, high):
            seen = int(visible[row])
            at = torch.arange(seen)
            slot = table[s, at // entries] * entries + at % entries
            keys = ops.kv_load(cache, slot, record, q.shape[2], q.dtype, entries)
            own = q[row][None, None], keys[None], w[row][None, None], visible[row][None, None]
            scores = ops.index_logits(*own)[0]
            runs = ops.candidate_blocks(scores, visible[row][None], block, max(blocks, 1))
            kept.append(runs[0].nonzero()[:, 0].tolist())
            if within is not None:
                told = torch.zeros(1, -(-seen // block), dtype=torch.bool)
                told[0, within[row][within[row] >= 0]] = True
                scores = ops.candidate_mask(scores, told, block)
            found = ops.topk_select(scores, k)[0]
            chosen.append(found[found >= 0].tolist())
    return chosen, kept


def present(ids: torch.Tensor) -> list[list[int]]:
    return [[i for i in row if i >= 0] for row in ids.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**32))
def test_it_chooses_what_its_steps_choose(backend: str, seed: int) -> None:
    args = SPEC.cases(seeded(seed), torch.float32)
    with use(backend=backend, op="index_topk"):
        chosen, kept = ops.index_topk(*args)
    wanted_chosen, wanted_kept = by_steps(args)
    assert present(chosen) == wanted_chosen
    if args[10]:
        assert present(kept) == wanted_kept


@pytest.mark.parametrize("backend", BACKENDS)
@given(seed=st.integers(0, 2**32))
def test_a_row_chooses_the_same_without_its_neighbours(backend: str, seed: int) -> None:
    args = SPEC.cases(seeded(seed), torch.float32)
    q, w, cache, table, first, visible, record, k, entries, block, blocks, within = args
    generator = seeded(seed + 1)
    q = torch.randn(q.shape, generator=generator)  # roundings differ where order does
    with use(backend=backend, op="index_topk"):
        together = ops.index_topk(q, w, *args[2:])
        for s in range(len(first) - 1):
            for row in range(int(first[s]), int(first[s + 1])):
                one = slice(row, row + 1)
                alone = ops.index_topk(
                    q[one], w[one], cache, table[s : s + 1], torch.tensor([0, 1]), visible[one],
                    record, k, entries, block, blocks, None if within is None else within[one],
                )  # fmt: skip
                if backend == "native":  # torch's products promise no bits
                    assert all(map(torch.equal, alone, (part[one] for part in together)))


def test_the_torch_form_scores_each_sequence_by_itself_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sequence of 1,000 entries beside 31 of 40: nothing is padded to the longest."""
    shapes = SPEC.shapes(torch.float32)
    args = shapes["ragged decode"]
    asked: list[int] = []

    def counting(q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        asked.append(q.shape[0] * q.shape[1] * k.shape[1])
        return reference.reference_index_logits(q, k, *rest)

    monkeypatch.setattr(reference, "CHUNK_BYTES", 4 * 8 * 512)
    parts = reference.reference_kv_load, counting, reference.reference_topk_select
    chosen, _ = reference.composed(*parts, *args)
    visible = args[5]
    assert sum(asked) == int(visible.sum())
    assert max(asked) <= 512
    assert torch.equal(chosen, SPEC.reference(*args)[0])


def test_rows_that_see_few_entries_are_not_scored() -> None:
    q, w, cache, table, first, visible, *rest = SPEC.shapes(torch.float32)["ragged decode"]
    broken = torch.full_like(q, torch.nan)
    k = 100
    for backend in BACKENDS:
        with use(backend=backend, op="index_topk"):
            chosen, _ = ops.index_topk(
                broken, w, cache, table, first, visible.clamp(max=k), rest[0], k, *rest[2:]
            )
        assert torch.equal(chosen, torch.arange(k).expand(32, -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_outside_the_cache_and_short_tables_are_errors(backend: str) -> None:
    args = list(SPEC.shapes(torch.float32)["decode 1 of 4096"])
    with use(backend=backend, op="index_topk"):
        for at, wrong in ((3, args[3] + len(args[2])), (3, args[3][:, :-1]), (4, args[4] * 2)):
            with pytest.raises(IndexError):
                ops.index_topk(*args[:at], wrong, *args[at + 1 :])
