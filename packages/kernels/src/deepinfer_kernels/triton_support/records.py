"""How a cache is described to the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.checks import require
from deepinfer_kernels.formats.pages import page_entries
from deepinfer_kernels.formats.records import record_format

__all__ = ["RECORD", "record_arguments"]

RECORD = {"fp8": 0, "fp4": 1, "index_fp4": 2, "raw": 3}


def record_arguments(
    cache: Tensor, record: str, dim: int, dtype: torch.dtype, entries: int | None
) -> tuple[tuple[Tensor, int, int], dict[str, Any]]:
    """((cache, page stride, entries), constants of a record).

    Raises ShapeError for more slots than kernels count, 2^31 - 1.
    """
    fmt = record_format(record)
    fmt.check_dim(dim)
    count = page_entries(cache, record, dim, dtype) if entries is None else entries
    slots = cache.shape[0] * count
    require(slots < 2**31, "a cache of records", f"has at most {2**31 - 1} slots, got {slots}")
    constants = {
        "DATA": fmt.data_bytes(dim, dtype),
        "SCALES": fmt.scale_bytes(dim),
        "RECORD": RECORD[record],
        "ITEM": dtype.itemsize,
    }
    return (cache, cache.stride(0), max(count, 1)), constants
