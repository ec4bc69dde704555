"""The operators of deepinfer_kernels that the model calls."""

from __future__ import annotations

from deepinfer_kernels import formats, ops

__all__ = ["formats", "ops"]
