"""`mhc_pre_norm` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_cpu import WIDE
from deepinfer_kernels.ops.mhc_pre_norm.reference import composed

mhc_pre_norm = partial(composed, WIDE)
