"""Cache record formats: sizes, codes, pack, unpack and fake quantisation."""

from __future__ import annotations

from deepinfer_kernels.formats.quant import fake_quant, pack, unpack
from deepinfer_kernels.formats.records import (
    RECORDS,
    RecordFormat,
    record_bytes,
    record_format,
    section_bytes,
)

__all__ = [
    "RECORDS",
    "RecordFormat",
    "fake_quant",
    "pack",
    "record_bytes",
    "record_format",
    "section_bytes",
    "unpack",
]
