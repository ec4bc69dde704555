"""Keys and values of grouped-query attention in blocks of 128 tokens, for families without a state.

A block holds, layer by layer, the keys [128, kv_heads, d] and then the values of its tokens in the
model's dtype. Nothing else is kept of a sequence, so a slot holds no bytes and a prefix may end
behind any block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepinfer_engine.core.runner import BLOCK_TOKENS, CacheLayout, Region
from deepinfer_engine.model.sequence_rows import SequenceRows


def paged_layout(
    *, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, fingerprint: str
) -> CacheLayout:
    """`key` and `value` of every layer; a state of 0 bytes."""
    nbytes = BLOCK_TOKENS * kv_heads * head_dim * dtype.itemsize
    regions = tuple(
        Region(name, layer, (2 * layer + i) * nbytes, nbytes)
        for layer in range(layers)
        for i, name in enumerate(("key", "value"))
    )
    described = json.dumps(
        {
            "version": 1,
            "block": [asdict(r) for r in regions],
            "dtype": str(dtype),
            "heads": [kv_heads, head_dim],
            "model": fingerprint,
        },
        sort_keys=True,
    )
    return CacheLayout(
        block_tokens=BLOCK_TOKENS,
        block_bytes=2 * layers * nbytes,
        state_bytes=0,
        block_regions=regions,
        state_regions=(),
        layout_hash=hashlib.blake2b(described.encode(), digest_size=16).hexdigest(),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences of one forward pass that attend together: equally many new rows and blocks."""

    rows: Tensor
    """[S * q] their rows of the batch."""
    table: Tensor
    """[S, blocks]"""
    mask: Tensor
    """bool [S, 1, q, blocks * 128]: which keys a row sees."""
    size: int
    query: int


class PagedBatch:
    """Index tensors of one forward pass: which rows, of which sequences, at which positions."""

    def __init__(self, sequences: Sequence[SequenceRows]) -> None:
        lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
        starts = np.array([s.start for s in sequences], dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        of_row = np.repeat(np.arange(len(sequences)), lengths)
        self.position = starts[of_row] + np.arange(int(lengths.sum())) - first[of_row]
        self.ids = torch.from_numpy(np.concatenate([s.token_ids for s in sequences]))
        blocks = np.concatenate(
            [
                np.asarray(s.block_table, dtype=np.int64)[self.position[a : a + n] // BLOCK_TOKENS]
                for s, a, n in zip(sequences, first.tolist(), lengths.tolist(), strict=True)
            ]
        )
        self.block = torch.from_numpy(blocks)
        """[n] block that keeps each row's key and value."""
        self.offset = torch.from_numpy(self.position % BLOCK_TOKENS)
        """[n] and where in it."""
        self.groups = self._grouped(sequences, starts, lengths, first)

    def _grouped(
        self, sequences: Sequence[SequenceRows], starts: np.ndarray, lengths: np.ndarray,
        first: np.ndarray,
    ) -> list[_Group]:  # fmt: skip
        """Nobody pays for a longer neighbour: only sequences of like shape share a call."""
        members: dict[tuple[int, int], list[int]] = {}
        used = -(-(starts + lengths) // BLOCK_TOKENS)
        for i, shape in enumerate(zip(lengths.tolist(), used.tolist(), strict=True)):
            members.setdefault(shape, []).append(i)
        groups: list[_Group] = []
        for (query, count), those in members.items():
            rows = first[those][:, None] + np.arange(query)
            table = np.array([list(sequences[i].block_table[:count]) for i in those])
            key = np.arange(count * BLOCK_TOKENS)
            seen = key <= (starts[those][:, None] + np.arange(query))[:, :, None]
            groups.append(
                _Group(
                    rows=torch.from_numpy(rows.reshape(-1)),
                    table=torch.from_numpy(table),
                    mask=torch.from_numpy(seen)[:, None],
                    size=len(those),
                    query=query,
                )
            )
        return groups


class PagedCache:
    """The blocks of one model, as bytes and as keys and values."""

    def __init__(
        self, layout: CacheLayout, *, num_blocks: int, num_slots: int, layers: int, kv_heads: int,
        head_dim: int, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        self.states = torch.zeros(num_slots, 0, dtype=torch.uint8)
        self._typed = self.blocks.view(dtype).view(
            num_blocks, layers, 2, BLOCK_TOKENS, kv_heads, head_dim
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch) -> Tensor:
        """Keep the rows' keys and values [n, kv_heads, d]; causal attention of q [n, heads, d]
        over everything kept of each row's own sequence: [n, heads, d]."""
        keys, values = self._typed[:, layer, 0], self._typed[:, layer, 1]
        keys[batch.block, batch.offset] = k
        values[batch.block, batch.offset] = v
        out = torch.empty_like(q)
        for group in batch.groups:
            shape = (group.size, -1, *k.shape[1:])
            one = scaled_dot_product_attention(
                q[group.rows].view(group.size, group.query, *q.shape[1:]).transpose(1, 2),
                keys[group.table].view(shape).transpose(1, 2),
                values[group.table].view(shape).transpose(1, 2),
                attn_mask=group.mask,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[group.rows] = one.transpose(1, 2).reshape(-1, *q.shape[1:])
        return out
