"""`mhc_pre_norm` composed of the Triton forms of its parts; products are the device library's."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_triton import TRITON
from deepinfer_kernels.ops.mhc_pre_norm.reference import composed

mhc_pre_norm = partial(composed, TRITON)
