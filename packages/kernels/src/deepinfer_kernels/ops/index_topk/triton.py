"""`index_topk` composed of the Triton forms of its parts."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops.index_logits.triton import index_logits
from deepinfer_kernels.ops.index_topk.reference import composed
from deepinfer_kernels.ops.kv_load.triton import kv_load
from deepinfer_kernels.ops.topk_select.triton import topk_select

index_topk = partial(composed, kv_load, index_logits, topk_select)
