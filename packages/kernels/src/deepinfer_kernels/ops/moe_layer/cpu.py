"""`moe_layer` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_cpu import WIDE
from deepinfer_kernels.ops.moe_layer.reference import composed

moe_layer = partial(composed, WIDE)
