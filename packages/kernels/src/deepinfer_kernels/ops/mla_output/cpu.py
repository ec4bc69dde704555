"""`mla_output` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_cpu import WIDE
from deepinfer_kernels.ops.mla_output.reference import composed

mla_output = partial(composed, WIDE)
