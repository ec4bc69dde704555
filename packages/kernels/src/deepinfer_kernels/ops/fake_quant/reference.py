"""`fake_quant` is what a record makes of its values; the formats say how."""

from __future__ import annotations

from deepinfer_kernels.formats.quant import fake_quant

__all__ = ["fake_quant"]
