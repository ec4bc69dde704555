"""Device memory of the caches: `num_blocks` KV blocks and `num_slots` state slots, as bytes with
typed section views."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.core.runner import BLOCK_TOKENS, CacheLayout
from deepinfer_engine.model.family import CacheQuant
from deepinfer_engine.model.v41.config import Record, TextConfig
from deepinfer_engine.model.v41.layout import Records
from deepinfer_engine.model.v41.weights import accumulation_dtype

Memory = Callable[[str, int], Tensor]
"""(name, bytes) -> uint8 [bytes], zero."""


class Section:
    """Records of one layer in a pool: row `page * entries + i` is entry `i` of page (block or slot)
    `page`."""

    def __init__(
        self,
        view: Tensor,
        ops: Operators,
        *,
        record: Record,
        entries: int,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        self._ops = ops
        self.view = view
        self.record = record
        self.entries = entries
        self.dim = dim
        self.dtype = dtype

    def store(self, rows: Tensor, slots: Tensor) -> None:
        """Write rows [n, dim] to int64 slots [n]; slot -1 is skipped."""
        self._ops.kv_store(rows, self.view, slots, self.record, self.entries)

    def load(self, slots: Tensor) -> Tensor:
        """Read [..., dim] at int64 slots [...]; slot -1 reads zeros."""
        return self._ops.kv_load(self.view, slots, self.record, self.dim, self.dtype, self.entries)


class Pools:
    """All cache memory of one model instance."""

    def __init__(
        self,
        config: TextConfig,
        layout: CacheLayout,
        ops: Operators,
        *,
        num_blocks: int,
        num_slots: int,
        dtype: torch.dtype,
        cache_quant: CacheQuant,
        memory: Memory | None = None,
    ) -> None:
        """memory: where the bytes come from, by name and number; zeros of this process else."""
        self.layout = layout
        self.ops = ops
        self.records = Records.of(config, cache_quant, dtype)
        self._config = config
        self._dtype = dtype
        self.blocks = _bytes(memory, "blocks", num_blocks, layout.block_bytes)
        self.states = _bytes(memory, "states", num_slots, layout.state_bytes)
        self.index: dict[int, Section] = {}
        self.main: dict[int, Section] = {}
        self.ring: dict[int, Section] = {}
        self.compress: dict[int, Tensor] = {}
        """Layer -> accumulation dtype [slots, rows, 2, D]; row `t % rows`, index 0 gate, 1
        value."""
        self._bind()

    def grow(self, num_blocks: int, num_slots: int) -> None:
        """More memory, contents kept; sections are bound anew, views taken before are stale."""
        for name, rows in (("blocks", num_blocks), ("states", num_slots)):
            old: Tensor = getattr(self, name)
            new = torch.zeros(max(rows, old.shape[0]), old.shape[1], dtype=torch.uint8)
            new[: old.shape[0]] = old
            setattr(self, name, new)
        self._bind()

    def _bind(self) -> None:
        for region in self.layout.block_regions:
            view = self.blocks[:, region.offset : region.offset + region.nbytes]
            entries = BLOCK_TOKENS // self._config.compress_ratios[region.layer]
            if region.name == "index":
                self.index[region.layer] = Section(
                    view,
                    self.ops,
                    record=self.records.index,
                    entries=entries,
                    dim=self._config.index_head_dim,
                    dtype=self._dtype,
                )
            else:
                self.main[region.layer] = Section(
                    view,
                    self.ops,
                    record=self.records.main,
                    entries=entries,
                    dim=self._config.head_dim,
                    dtype=self._dtype,
                )
        for region in self.layout.state_regions:
            view = self.states[:, region.offset : region.offset + region.nbytes]
            if region.name == "ring":
                self.ring[region.layer] = Section(
                    view,
                    self.ops,
                    record=self.records.swa,
                    entries=self._config.ring_slots,
                    dim=self._config.head_dim,
                    dtype=self._dtype,
                )
            else:
                typed = view.view(accumulation_dtype(self._dtype))
                slots = self.states.shape[0]
                self.compress[region.layer] = typed.view(slots, -1, 2, self._config.head_dim)


def _bytes(memory: Memory | None, name: str, rows: int, width: int) -> Tensor:
    if memory is None:
        return torch.zeros(rows, width, dtype=torch.uint8)
    return memory(name, rows * width).view(rows, width)
