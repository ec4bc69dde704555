"""Sparse latent attention."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, integer, shape
from deepinfer_kernels.ops._dispatch import kernel


def mla_sparse(
    q: Tensor, kv: Tensor, idx: Tensor, sink: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention of every head over listed rows of one shared key/value matrix.

    q: [n, heads, D]; kv: [M, D], key and value at once; idx: int64 [n, K] rows of kv, -1 for none;
    sink: [heads] logits that only add to the denominator, not scaled (-inf for no sink).
    Returns (out [n, heads, D] like q, lse [n, heads] in the accumulation dtype): lse is the natural
    logarithm without the sink. A row with no key gives out 0 and lse +inf. An index past M - 1
    raises IndexError. Temporaries stay below about 64 MB whatever n.
    """
    op = "mla_sparse"
    floating(op, q=q, kv=kv, sink=sink)
    integer(op, idx=idx)
    shape(op, "q", q, (None, None, None))
    shape(op, "kv", kv, (None, q.shape[2]))
    shape(op, "idx", idx, (q.shape[0], None))
    shape(op, "sink", sink, (q.shape[1],))
    return kernel(op, q.device)(q, kv, idx, sink, scale)
