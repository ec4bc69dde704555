"""`norm_rope_quant` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_cpu import WIDE
from deepinfer_kernels.ops.norm_rope_quant.reference import composed

norm_rope_quant = partial(composed, WIDE)
