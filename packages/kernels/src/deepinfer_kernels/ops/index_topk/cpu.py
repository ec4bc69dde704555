"""`index_topk` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops.index_logits.cpu import index_logits
from deepinfer_kernels.ops.index_topk.reference import composed
from deepinfer_kernels.ops.kv_load.reference import kv_load
from deepinfer_kernels.ops.topk_select.cpu import topk_select

index_topk = partial(composed, kv_load, index_logits, topk_select)
