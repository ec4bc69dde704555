"""A two-layer causal attention model on the CPU with a paged KV cache, in float32.

Keys and values of a token depend on all tokens before it, so a wrong or missing page changes the
output. Scores are computed query by query, so that a prefill in two parts does the same arithmetic
in the same order as one in a single part.
"""

from __future__ import annotations

import torch

LAYERS = ("layers.0.attn", "layers.1.attn")
HEADS, WIDTH = 2, 8
HIDDEN = HEADS * WIDTH


class TinyAttention:
    """caches: layer -> (2, num_blocks, block_size, HEADS, WIDTH), keys and values in pages."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        make = torch.Generator().manual_seed(7)
        self.block_size = block_size
        self._embedding = torch.randn(1000, HIDDEN, generator=make)
        self._weights = [
            [torch.randn(HIDDEN, HIDDEN, generator=make) / HIDDEN**0.5 for _ in range(3)]
            for _ in LAYERS
        ]
        shape = (2, num_blocks, block_size, HEADS, WIDTH)
        self.caches = {name: torch.zeros(shape) for name in LAYERS}

    @property
    def page_bytes(self) -> int:
        return 2 * self.block_size * HEADS * WIDTH * 4

    def run(self, tokens: list[int], block_ids: list[int], start: int, end: int) -> torch.Tensor:
        """Compute tokens `start .. end - 1`, the earlier ones being in the cache.

        returns: (end - start, HIDDEN), the last layer's output.
        """
        rows = []
        for position in range(start, end):
            hidden = self._embedding[tokens[position]]
            for (query_w, key_w, value_w), cache in zip(
                self._weights, self.caches.values(), strict=True
            ):
                page, slot = divmod(position, self.block_size)
                cache[0, block_ids[page], slot] = (key_w @ hidden).reshape(HEADS, WIDTH)
                cache[1, block_ids[page], slot] = (value_w @ hidden).reshape(HEADS, WIDTH)
                pages = torch.tensor(block_ids[: page + 1])
                keys, values = cache[:, pages].flatten(1, 2)[:, : position + 1]
                query = (query_w @ hidden).reshape(HEADS, WIDTH)
                weights = torch.softmax(torch.einsum("hw,thw->th", query, keys), dim=0)
                attended = torch.einsum("th,thw->hw", weights, values)
                hidden = hidden + attended.reshape(HIDDEN)
            rows.append(hidden)
        return torch.stack(rows)
