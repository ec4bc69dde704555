"""Where every cached byte of a V4.1 model lives, inside one KV block and one state slot.

Block (128 tokens, persistent): for each KV source layer in order, the index-key section, then the
main section, each padded to 32 bytes; a source with ratio r has 128/r entries. State slot (one a
sequence): the sliding-window ring of every backbone and draft layer, then the compress state of
every source with ratio > 1.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

import torch

from deepinfer_engine.adapters.kernels import formats
from deepinfer_engine.core.runner import BLOCK_TOKENS, CacheLayout, Region
from deepinfer_engine.model.family import CacheQuant
from deepinfer_engine.model.v41.config import Record, TextConfig
from deepinfer_engine.model.v41.weights import accumulation_dtype

_SECTION_ALIGN = 32
_UNIT_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Records:
    """Which rounding the model applies (`*_rounding`) and which bytes hold the result (`*`)."""

    swa: Record
    main: Record
    index: Record
    swa_rounding: Record
    main_rounding: Record
    index_rounding: Record

    @staticmethod
    def of(config: TextConfig, cache_quant: CacheQuant, dtype: torch.dtype) -> Records:
        """float64 keeps the rounding of the model but stores its results unpacked."""
        if cache_quant == "none":
            return Records("raw", "raw", "raw", "raw", "raw", "raw")
        main: Record = "fp4" if config.use_fp4_sparse_kv else "fp8"
        if dtype == torch.float64:
            return Records("raw", "raw", "raw", "fp8", main, "index_fp4")
        return Records("fp8", main, "index_fp4", "fp8", main, "index_fp4")


def _padded(nbytes: int, align: int) -> int:
    return -(-nbytes // align) * align


def build_layout(
    config: TextConfig, *, dtype: torch.dtype, cache_quant: CacheQuant, fingerprint: str
) -> CacheLayout:
    """Regions named `index` and `main` in a block, `ring` and `compress` in a state slot."""
    records = Records.of(config, cache_quant, dtype)
    block: list[Region] = []
    at = 0
    for layer in config.kv_source_layer_ids:
        entries = BLOCK_TOKENS // config.compress_ratios[layer]
        for name, record, dim in (
            ("index", records.index, config.index_head_dim),
            ("main", records.main, config.head_dim),
        ):
            nbytes = _padded(entries * formats.record_bytes(record, dim, dtype), _SECTION_ALIGN)
            block.append(Region(name, layer, at, nbytes))
            at += nbytes
    block_bytes = max(_padded(at, _UNIT_ALIGN) if records.main == "raw" else at, _UNIT_ALIGN)

    state: list[Region] = []
    at = 0
    ring_bytes = _padded(
        config.ring_slots * formats.record_bytes(records.swa, config.head_dim, dtype),
        _SECTION_ALIGN,
    )
    for layer in range(config.total_layers):
        state.append(Region("ring", layer, at, ring_bytes))
        at += ring_bytes
    at = _padded(at, _UNIT_ALIGN)
    for layer in config.kv_source_layer_ids:
        if config.compress_ratios[layer] > 1:
            nbytes = (
                _compress_rows(config, layer)
                * 2
                * config.head_dim
                * accumulation_dtype(dtype).itemsize
            )
            state.append(Region("compress", layer, at, nbytes))
            at = _padded(at + nbytes, _UNIT_ALIGN)
    described = json.dumps(
        {
            "version": 1,
            "block": [asdict(r) for r in block],
            "state": [asdict(r) for r in state],
            "records": asdict(records),
            "dtype": str(dtype),
            "window": config.sliding_window,
            "ring": config.ring_slots,
            "model": fingerprint,
        },
        sort_keys=True,
    )
    return CacheLayout(
        block_tokens=BLOCK_TOKENS,
        block_bytes=block_bytes,
        state_bytes=_padded(at, _UNIT_ALIGN),
        block_regions=tuple(block),
        state_regions=tuple(state),
        layout_hash=hashlib.blake2b(described.encode(), digest_size=16).hexdigest(),
    )


def _compress_rows(config: TextConfig, layer: int) -> int:
    return config.compress_ratios[layer] + max(0, config.backtrack - 1)
