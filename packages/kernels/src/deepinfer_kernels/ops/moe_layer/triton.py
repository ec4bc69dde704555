"""`moe_layer` composed of the Triton forms of its parts; products are the device library's."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_triton import TRITON
from deepinfer_kernels.ops.moe_layer.reference import composed

moe_layer = partial(composed, TRITON)
