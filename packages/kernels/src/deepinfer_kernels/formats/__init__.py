"""Cache records (sizes, pack, unpack, fake quantisation) and weights as GGUF stores them."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.formats.quant import pack, unpack
from deepinfer_kernels.formats.records import (
    RECORDS,
    RecordFormat,
    record_bytes,
    record_format,
    section_bytes,
)
from deepinfer_kernels.formats.stored import (
    PACKED,
    STORED,
    STORED_BLOCK,
    pack_weight,
    store_weight,
    stored_row_bytes,
    widen_weight,
)

__all__ = [
    "PACKED",
    "RECORDS",
    "STORED",
    "STORED_BLOCK",
    "RecordFormat",
    "fake_quant",
    "pack",
    "pack_weight",
    "record_bytes",
    "record_format",
    "section_bytes",
    "store_weight",
    "stored_row_bytes",
    "unpack",
    "widen_weight",
]


def fake_quant(x: Tensor, record: str) -> Tensor:
    """``unpack(pack(x))`` bit for bit: [..., D] floating to [..., D] like x.

    ``raw`` is the identity and returns x itself. See `deepinfer_kernels.ops.fake_quant`.
    """
    if record == "raw":
        return x
    from deepinfer_kernels import ops  # the operators import this package's record sizes

    return ops.fake_quant(x, record)
