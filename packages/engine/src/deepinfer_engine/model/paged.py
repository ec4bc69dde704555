"""Keys and values of grouped-query attention in blocks of 128 tokens, for families without a state.

A block holds, layer by layer, the keys [128, kv_heads, d] and then the values of its tokens in the
model's dtype. Nothing else is kept of a sequence, so a slot holds no bytes and a prefix may end
behind any block.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import torch

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


class PagedBatch:
    """Index tensors of one forward pass: which rows, of which sequences, at which positions.

    Nothing is padded: a sequence costs what it costs alone, whoever stands beside it.
    """

    def __init__(self, sequences: Sequence[SequenceRows]) -> None:
        lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
        starts = np.array([s.start for s in sequences], dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(lengths)])
        of_row = np.repeat(np.arange(len(sequences)), lengths)
        self.position = starts[of_row] + np.arange(int(first[-1])) - first[of_row]
        """[n] position of each row in its sequence."""
        used = -(-(starts + lengths) // BLOCK_TOKENS)
        table = np.full((len(sequences), int(used.max())), -1, dtype=np.int64)
        for i, (s, count) in enumerate(zip(sequences, used.tolist(), strict=True)):
            table[i, :count] = s.block_table[:count]
        block = table[of_row, self.position // BLOCK_TOKENS]
        self.ids = torch.from_numpy(np.concatenate([s.token_ids for s in sequences]))
        self.slot = torch.from_numpy(block * BLOCK_TOKENS + self.position % BLOCK_TOKENS)
        """[n] where each row's key and value are kept."""
        self.table = torch.from_numpy(table)
        """[S, blocks], -1 behind a sequence's own."""
        self.start = torch.from_numpy(starts)
        self.first = torch.from_numpy(first)
        """[S + 1] first row of each sequence, and the number of rows."""


class PagedCache:
    """The blocks of one model, as bytes and as keys and values."""

    def __init__(
        self,
        layout: CacheLayout,
        *,
        num_blocks: int,
        num_slots: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.layout = layout
        self.blocks = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
        self.states = torch.zeros(num_slots, 0, dtype=torch.uint8)
        typed = self.blocks.view(dtype).view(
            num_blocks, layers, 2, BLOCK_TOKENS, kv_heads, head_dim
        )
        self.keys = [typed[:, layer, 0] for layer in range(layers)]
        """Of each layer [blocks, 128, kv_heads, d]."""
        self.values = [typed[:, layer, 1] for layer in range(layers)]
