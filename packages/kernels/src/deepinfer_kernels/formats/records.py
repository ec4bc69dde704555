"""Cache records: how one token's vector is stored, as data.

=============  ==========================  ====================================  =============
record         payload                     scale                                 order in a page
=============  ==========================  ====================================  =============
``fp8``        E4M3, one byte a channel    UE8M0, one per 32 channels            interleaved
``fp4``        E2M1, two channels a byte   E4M3, one per 16 channels             interleaved
``index_fp4``  E2M1, two channels a byte   UE8M0, one per 32 channels            sectioned
``raw``        the dtype's own bytes       none                                  interleaved
=============  ==========================  ====================================  =============

*interleaved*: each entry is its payload followed by its scales. *sectioned*: the payload of all
entries of the page, then the scales of all of them. Even channels take the low nibble.
At 512 channels a record has 528 (fp8) or 288 bytes (fp4); index_fp4 at 128 channels has 68.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from deepinfer_kernels.errors import RecordError

__all__ = ["RECORDS", "RecordFormat", "record_bytes", "record_format", "section_bytes"]


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One way to store a vector. ``block`` channels share one scale byte; 0 means no scale."""

    name: str
    value_bits: int
    scale: Literal["ue8m0", "e4m3", "none"]
    block: int
    layout: Literal["interleaved", "sectioned"]

    def check_dim(self, dim: int) -> None:
        """Raise RecordError unless a vector of ``dim`` channels can be stored."""
        if dim <= 0 or (self.block and dim % self.block):
            raise RecordError(
                f"record {self.name!r} stores a positive multiple of {self.block or 1} channels, "
                f"got {dim}; pad the vector or choose the record 'raw'"
            )

    def data_bytes(self, dim: int, dtype: torch.dtype | None = None) -> int:
        """Payload bytes of one entry. ``raw`` needs the dtype.

        Raises RecordError for a record format that is unknown or does not fit.
        """
        self.check_dim(dim)
        if self.name != "raw":
            return dim * self.value_bits // 8
        if dtype is None:
            raise RecordError("record 'raw' stores the dtype's own bytes: pass dtype")
        return dim * dtype.itemsize

    def scale_bytes(self, dim: int) -> int:
        """Scale bytes of one entry."""
        return dim // self.block if self.block else 0


RECORDS: Mapping[str, RecordFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            RecordFormat("fp8", 8, "ue8m0", 32, "interleaved"),
            RecordFormat("fp4", 4, "e4m3", 16, "interleaved"),
            RecordFormat("index_fp4", 4, "ue8m0", 32, "sectioned"),
            RecordFormat("raw", 0, "none", 0, "interleaved"),
        )
    }
)


def record_format(record: str) -> RecordFormat:
    """The format of that name, or RecordError naming the known ones."""
    try:
        return RECORDS[record]
    except KeyError:
        known = ", ".join(RECORDS)
        raise RecordError(f"unknown cache record {record!r}; the records are {known}") from None


def record_bytes(record: str, dim: int, dtype: torch.dtype | None = None) -> int:
    """Bytes of one entry of ``dim`` channels, payload and scales; ``raw`` needs ``dtype``."""
    fmt = record_format(record)
    return fmt.data_bytes(dim, dtype) + fmt.scale_bytes(dim)


def section_bytes(
    record: str, dim: int, entries: int, dtype: torch.dtype | None = None, align: int = 32
) -> int:
    """Bytes of a page section holding ``entries`` records, rounded up to ``align``."""
    return -(-entries * record_bytes(record, dim, dtype) // align) * align
