"""What `index_topk` is: its signature, checks, fake form, cost, tolerance and cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import check_pages, floating, integer, require, shape
from deepinfer_kernels.draw import coin, one_of, seeded, size
from deepinfer_kernels.formats.records import record_bytes
from deepinfer_kernels.ops._describe import describe
from deepinfer_kernels.ops._dispatch import dispatch
from deepinfer_kernels.ops.index_topk.reference import index_topk as reference_index_topk
from deepinfer_kernels.ops.kv_store.reference import kv_store as reference_kv_store
from deepinfer_kernels.registry import Tolerance


def index_topk(
    q: Tensor,
    w: Tensor,
    cache: Tensor,
    table: Tensor,
    first: Tensor,
    visible: Tensor,
    record: str,
    k: int,
    entries: int | None = None,
    block: int = 8,
    blocks: int = 0,
    within: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The k entries of highest score, ``sum_head w_head * relu(q_head . key)``, of each row.

    Keys are read from the pages of a row's own sequence, a run at a time: no matrix of scores is
    made, and the cost is the sum of the sequences' own. q: [n, heads, dim] and w: [n, heads], the
    rows of sequence s being first[s] .. first[s + 1] - 1; cache: uint8 [P, section_bytes] of
    records; table: int64 [S, T] pages of each sequence in order; first: int64 [S + 1], from 0 to
    n; visible: int64 [n], a row sees the entries 0 .. visible - 1 of its sequence.
    block, blocks: also keep the ``blocks`` runs of ``block`` entries whose best score is highest,
    the newest visible one always. within: int64 [n, C] ascending ids of such runs, -1 padded: a
    row chooses among their entries alone.
    Of equal scores the lower index is taken; NaN and -inf never are. A row that has no more than k
    entries (runs) to choose among gets them all, unscored. A page outside the cache raises
    IndexError. Returns int64 ([n, k] entries, [n, blocks] runs), ascending, -1 padded.
    """
    op = "index_topk"
    floating(op, q=q, w=w)
    integer(op, table=table, first=first, visible=visible)
    shape(op, "q", q, (None, None, None))
    shape(op, "w", w, q.shape[:2])
    check_pages(op, cache, record, q.shape[2], q.dtype, entries)
    require(entries != 0, op, "a page holds at least one entry")
    shape(op, "visible", visible, q.shape[:1])
    shape(op, "first", first, (None,))
    require(first.shape[0] >= 1, op, "first holds at least the 0")
    shape(op, "table", table, (first.shape[0] - 1, None))
    require(k >= 1 and block >= 1 and blocks >= 0, op, "k and block are at least 1, blocks 0")
    if within is not None:
        integer(op, within=within)
        shape(op, "within", within, (q.shape[0], None))
        require(blocks == 0, op, "runs are kept of all entries: blocks is 0 beside within")
    return dispatch(
        op, q, w, cache, table, first, visible, record, k, entries, block, blocks, within
    )


def _args(
    g: torch.Generator,
    parts: Sequence[tuple[int, int]],
    heads: int,
    dim: int,
    entries: int,
    record: str,
    dtype: torch.dtype,
    choice: tuple[int, int, int, int],
) -> tuple[Any, ...]:
    """``parts``: (entries already there, new rows) of each sequence, one entry a row; ``choice``:
    (k, block, blocks, blocks to choose within). Small whole numbers: every sum is exact."""
    used = [-(-(past + rows) // entries) for past, rows in parts]
    order = torch.randperm(sum(used) + 1, generator=g)
    table = torch.full((len(parts), max(used, default=0)), -1)
    for s, ids in enumerate(order[: sum(used)].split(used)) if used else ():
        table[s, : used[s]] = ids
    width = record_bytes(record, dim, dtype)
    cache = torch.zeros(len(order), entries * width, dtype=torch.uint8)
    keys = torch.randint(-3, 4, (len(order) * entries, dim), generator=g).to(dtype)
    keys[:, ::16] = 3  # no block of a record is scaled by anything but a power of two
    reference_kv_store(keys, cache, torch.arange(len(keys)), record, entries)
    counts = torch.tensor([0, *(rows for _, rows in parts)], dtype=torch.int64)
    seen = [past + i + 1 for past, rows in parts for i in range(rows)]
    n, visible = int(counts.sum()), torch.tensor(seen, dtype=torch.int64)
    q = torch.randint(-2, 3, (n, heads, dim), generator=g).to(dtype)
    w = torch.randint(-2, 3, (n, heads), generator=g).to(dtype)
    k, block, blocks, told = choice
    within = None
    if told:
        runs = (visible.clamp(min=1) - 1) // block + 1
        drawn = (torch.rand(n, told, generator=g) * runs[:, None]).to(torch.int64).sort(1).values
        repeated = torch.nn.functional.pad(drawn[:, 1:] == drawn[:, :-1], (1, 0))
        within = drawn.masked_fill(repeated, -1)
    return q, w, cache, table, counts.cumsum(0), visible, record, k, entries, block, blocks, within


def _case(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    parts = [
        (one_of(g, (0, 1, 15, 40, 300)), one_of(g, (0, 1, 1, 5, 18))) for _ in range(size(g, 0, 4))
    ]
    block = one_of(g, (1, 4, 8))
    told = one_of(g, (1, 3, 9)) if coin(g, 0.4) else 0
    blocks = 0 if told else one_of(g, (0, 1, 2, 5))
    record = ("raw", "index_fp4")[size(g, 0, 1)]
    heads, dim = one_of(g, (1, 6, 8)), 32 * size(g, 1, 2)
    choice = (one_of(g, (1, 7, 30)), block, blocks, told)
    return _args(g, parts, heads, dim, 8 * one_of(g, (1, 2, 5)), record, dtype, choice)


def _shapes(dtype: torch.dtype) -> Mapping[str, tuple[Any, ...]]:
    wanted = {
        "decode 1 of 4096": ([(4095, 1)], (8, 32), (64, 8, 16, 0)),
        "ragged decode": ([(4095, 1), *[(100, 1)] * 31], (8, 32), (64, 8, 0, 0)),
        "prefill 256 of 4096": ([(3840, 256)], (8, 32), (64, 8, 16, 0)),
        "decode 1 within 16 runs": ([(4095, 1)], (8, 32), (64, 8, 0, 16)),
        "prefill 64 of 4096, 32 heads": ([(4032, 64)], (32, 128), (512, 8, 0, 0)),
    }
    return {
        label: _args(seeded(0), parts, *heads, 128, "index_fp4", dtype, choice)
        for label, (parts, heads, choice) in wanted.items()
    }


def _cost(
    q: Tensor, w: Tensor, cache: Tensor, table: Tensor, first: Tensor, visible: Tensor,
    record: str, k: int, entries: int | None, block: int, blocks: int, within: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    rows, seen = (first[1:] - first[:-1]).tolist(), visible.clamp(min=0)
    read = sum(int(part.max()) for part in seen.split(rows) if len(part))
    pairs = int(seen.sum()) if within is None else int((within >= 0).sum()) * block
    moved = (q.numel() + w.numel()) * q.itemsize + read * record_bytes(record, q.shape[2], q.dtype)
    return moved + q.shape[0] * (k + blocks) * 8, 2 * pairs * q.shape[1] * (q.shape[2] + 1)


def _fake(
    q: Tensor, w: Tensor, cache: Tensor, table: Tensor, first: Tensor, visible: Tensor,
    record: str, k: int, entries: int | None = None, block: int = 8, blocks: int = 0,
    within: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return visible.new_empty((q.shape[0], k)), visible.new_empty((q.shape[0], blocks))


SPEC = describe(
    index_topk,
    reference=reference_index_topk,
    fake=_fake,
    tags=frozenset({"memory", "compute"}),
    tolerance=Tolerance(),
    cost=_cost,
    cases=_case,
    shapes=_shapes,
    twin=False,
)
