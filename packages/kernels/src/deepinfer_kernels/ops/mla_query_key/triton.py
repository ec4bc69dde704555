"""`mla_query_key` composed of the Triton forms of its parts; products are the device library's."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops._parts_triton import TRITON
from deepinfer_kernels.ops.mla_query_key.reference import composed

mla_query_key = partial(composed, TRITON)
