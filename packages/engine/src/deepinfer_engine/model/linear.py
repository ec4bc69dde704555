"""Matrices of a model as its forward pass uses them: wide, or as their file stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators, formats
from deepinfer_engine.model.weights import StoredMatrix, Weights


@dataclass(frozen=True, slots=True)
class Matrix:
    """`x weight^T + bias`. form: of `StoredMatrix`, None for a weight [out, in] of the dtype of
    x."""

    weight: Tensor
    bias: Tensor | None
    form: str | None
    ops: Operators

    def __call__(self, x: Tensor) -> Tensor:
        if self.form is None:
            return self.ops.linear(x, self.weight, self.bias)
        return self.ops.quant_linear(x, self.weight, self.form, self.bias, False)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class MatrixReader:
    """Reads matrices; several of one input become one."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        ops: Operators,
        *,
        keep_stored: bool,
    ) -> None:
        self._weights, self._dtype, self._ops = weights, dtype, ops
        self._keep = keep_stored and dtype is not torch.float64

    def tensor(self, name: str) -> Tensor:
        return self._weights.tensor(name, self._dtype)

    def matrix(self, *names: str, bias: bool) -> Matrix:
        """The rows of all, one name behind the other; names without `.weight`."""
        own = torch.cat([self.tensor(f"{name}.bias") for name in names]) if bias else None
        parts = self._stored(names)
        if parts is not None:
            rows, form = torch.cat([p.rows for p in parts]), parts[0].form
            if len(rows) % 16 == 0:
                rows, form = formats.pack_weight(rows, form), form + formats.PACKED
            return Matrix(rows, own, form, self._ops)
        wide = [self.tensor(f"{name}.weight") for name in names]
        return Matrix(wide[0] if len(wide) == 1 else torch.cat(wide), own, None, self._ops)

    def _stored(self, names: Sequence[str]) -> list[StoredMatrix] | None:
        """None unless all are stored in one form."""
        if not self._keep:
            return None
        parts = [self._weights.stored(f"{name}.weight") for name in names]
        kept = [p for p in parts if p is not None]
        return kept if len(kept) == len(parts) and len({p.form for p in kept}) == 1 else None
