"""Index scores and the best of them, one sequence after the other, a run of entries at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.formats.pages import page_entries
from deepinfer_kernels.ops.index_logits.reference import index_logits as reference_index_logits
from deepinfer_kernels.ops.kv_load.reference import kv_load as reference_kv_load
from deepinfer_kernels.ops.topk_select.reference import topk_select as reference_topk_select

CHUNK_BYTES = 16 << 20
"""Scores of one run of entries stay near this size."""


class Best:
    """The best `most` of what came so far, by row; of equal scores the lower id stays."""

    def __init__(self, rows: int, most: int, like: Tensor, select: Callable[..., Tensor]) -> None:
        self._most, self._select = most, select
        self._scores = like.new_full((rows, 0), -torch.inf)
        self.ids = torch.zeros((rows, 0), dtype=torch.int64, device=like.device)

    def take(self, scores: Tensor, ids: Tensor) -> None:
        """scores, ids: [rows, m]; ids ascend, and lie above those that came before."""
        scores, ids = torch.cat([self._scores, scores], 1), torch.cat([self.ids, ids], 1)
        column = self._select(scores, self._most)
        none, at = column < 0, column.clamp(min=0)
        self._scores = scores.gather(1, at).masked_fill(none, -torch.inf)
        self.ids = ids.gather(1, at).masked_fill(none, -1)


def composed(
    load: Callable[..., Tensor],
    logits: Callable[..., Tensor],
    select: Callable[..., Tensor],
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
    """The operator out of the forms of its parts."""
    n, heads, dim = q.shape
    like = q.new_empty(0, dtype=acc_dtype(q.dtype))
    page = page_entries(cache, record, dim, q.dtype) if entries is None else entries
    chosen = visible.new_full((n, k), -1)
    kept = visible.new_full((n, blocks), -1)
    ends = first.tolist()
    if ends[0] != 0 or ends[-1] != n:
        raise IndexError(f"index_topk: first goes from 0 to {n}, got {ends[0]} to {ends[-1]}")
    for sequence, (low, high) in enumerate(pairwise(ends)):
        rows, seen = slice(low, high), visible[low:high].clamp(min=0)
        most = int(seen.max()) if high > low else 0
        if most == 0:
            continue
        pages = table[sequence, : -(-most // page)]
        if pages.shape[0] * page < most:
            raise IndexError(f"index_topk: the table of sequence {sequence} is too short")
        if bool(((pages < 0) | (pages >= cache.shape[0])).any()):
            raise IndexError(f"index_topk: a page of sequence {sequence} is outside the cache")

        def keys(
            ids: Tensor, *, pages: Tensor = pages, most: int = most
        ) -> Tensor:  # of any shape; -1 reads zeros
            at = ids.clamp(0, most - 1)
            slot = torch.where(ids >= 0, pages[at // page] * page + at % page, -1)
            return load(cache, slot, record, dim, q.dtype, page)

        if within is None:
            step = max(1, CHUNK_BYTES // ((high - low) * heads * like.itemsize) // block) * block
            best = Best(high - low, k, like, select)
            peaks = Best(high - low, blocks, like, select)
            scored = most > k or -(-most // block) > blocks > 0
            for base in range(0, most, step) if scored else ():
                ids = torch.arange(base, min(base + step, most), device=q.device)
                scores = logits(q[None, rows], keys(ids)[None], w[None, rows], (seen - base)[None])
                best.take(scores[0], ids.expand(high - low, -1))
                if blocks:
                    peaks.take(*_peaks(scores[0], base, seen, block))
            chosen[rows] = _or_all(best.ids, seen, k)
            kept[rows] = _or_all(peaks.ids, -(-seen // block), blocks)
        else:
            step = max(1, CHUNK_BYTES // max(1, within.shape[1] * block * dim * like.itemsize))
            for at in range(low, high, step):
                part = slice(at, min(at + step, high))
                chosen[part] = _listed(
                    keys, logits, select, q[part], w[part], visible[part], k, block, within[part]
                )
    return chosen, kept


def _listed(
    keys: Callable[..., Tensor],
    logits: Callable[..., Tensor],
    select: Callable[..., Tensor],
    q: Tensor,
    w: Tensor,
    visible: Tensor,
    k: int,
    block: int,
    within: Tensor,
) -> Tensor:
    """[n, k] of rows that each choose among the entries of their own blocks."""
    ids = (within[..., None] * block + torch.arange(block, device=q.device)).flatten(1)
    out = (within < 0).repeat_interleave(block, dim=1) | (ids >= visible[:, None])
    ids = ids.masked_fill(out, -1)
    count = torch.full_like(visible, ids.shape[1])[:, None]
    scores = logits(q[:, None], keys(ids), w[:, None], count)[:, 0].masked_fill(out, -torch.inf)
    few = (~out).sum(1, keepdim=True) <= k  # all of them, whatever their scores
    scores = torch.where(few, torch.where(out, -torch.inf, 0.0), scores)
    column = select(scores, k)
    return ids.gather(1, column.clamp(min=0)).masked_fill(column < 0, -1)


def _peaks(scores: Tensor, base: int, seen: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(peak of each block [rows, m], ids); the newest block's is +inf, -inf where nothing is."""
    rows, count = scores.shape
    limits = torch.finfo(scores.dtype)
    entry = base + torch.arange(count, device=scores.device)
    hidden = entry >= seen[:, None]
    finite = torch.where(scores.isnan(), -torch.inf, scores).clamp(limits.min, limits.max)
    finite = finite.masked_fill(hidden, -torch.inf)
    blocks = -(-count // block)
    padded = torch.nn.functional.pad(finite, (0, blocks * block - count), value=-torch.inf)
    best = padded.view(rows, blocks, block).amax(dim=-1)
    ids = base // block + torch.arange(blocks, device=scores.device)
    newest = ids == (seen[:, None] - 1).div(block, rounding_mode="floor")
    return best.masked_fill(newest, torch.inf), ids.expand(rows, -1)


def _or_all(ids: Tensor, count: Tensor, most: int) -> Tensor:
    """The ids found, or 0 .. count - 1 for rows that have no more than `most`."""
    place = torch.arange(most, device=count.device)
    every = torch.where(place < count[:, None], place, -1)
    if ids.shape[1] < most:
        return every
    return torch.where(count[:, None] <= most, every, ids)


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
    return composed(
        reference_kv_load,
        reference_index_logits,
        reference_topk_select,
        q, w, cache, table, first, visible, record, k, entries, block, blocks, within,
    )  # fmt: skip
