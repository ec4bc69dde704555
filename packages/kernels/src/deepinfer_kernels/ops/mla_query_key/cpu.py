"""`mla_query_key` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_cpu import WIDE
from deepinfer_kernels.ops.mla_query_key.reference import composed

mla_query_key = partial(composed, WIDE)
