"""How pages of keys or values are described to the C++ forms."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.errors import ShapeError

__all__ = ["heads_of_pages"]


def heads_of_pages(pages: Tensor) -> tuple[int, int, int, int]:
    """Pointer and the three outer strides of [pages, entries, kv_heads, D]; never a copy."""
    if pages.is_neg():
        raise ShapeError("a cache is written as it lies in memory, got a negated view of one")
    page, entry, head, channel = pages.stride()
    if channel != 1 and pages.shape[3] > 1:
        raise ShapeError("channels of a cached head are adjacent in memory")
    return pages.data_ptr(), page, entry, head
