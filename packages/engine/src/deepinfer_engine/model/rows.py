"""Tables that stay on disk: only the rows that are asked for are read.

The n-gram tables of the released model hold about 200 GB; a token reads 24 rows of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.model.quantised import decode_fp8_rows


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix inside a file: `rows` rows of `row_bytes` bytes from `offset` on."""

    path: Path
    offset: int
    rows: int
    row_bytes: int
    dtype: torch.dtype

    def map(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """uint8 [rows, row_bytes], mapped read-only. Raises OSError."""
        mapped = np.memmap(
            self.path, np.uint8, "r", offset=self.offset, shape=(self.rows, self.row_bytes)
        )
        return mapped.view(np.ndarray)  # plain indexing: the subclass would cost more than the read


class RowTable:
    """[rows, dim] on disk, read by row; with `scales`, FP8 with one scale per 32 columns."""

    def __init__(self, values: StoredRows, scales: StoredRows | None, dtype: torch.dtype) -> None:
        self._values, self._stored = values.map(), values.dtype
        self._scales = None if scales is None else scales.map()
        self._dtype = dtype

    def __len__(self) -> int:
        return self._values.shape[0]

    def take(self, rows: Tensor) -> Tensor:
        """int64 [...] to [..., dim] in the table's dtype."""
        index = rows.numpy()
        values = torch.from_numpy(self._values[index]).view(self._stored)
        if self._scales is None:
            return values.to(self._dtype)
        scales = torch.from_numpy(self._scales[index]).view(torch.float8_e8m0fnu)
        return decode_fp8_rows(values, scales, self._dtype)
