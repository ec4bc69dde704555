"""Sparse latent attention."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.ops._dispatch import kernel
from deepinfer_kernels.ops.cache import check_pages


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


def mla_decode_sparse(
    q: Tensor,
    swa_cache: Tensor,
    swa_idx: Tensor,
    swa_record: str,
    extra_cache: Tensor | None,
    extra_idx: Tensor | None,
    extra_record: str,
    sink: Tensor,
    scale: float,
    swa_entries: int | None = None,
    extra_entries: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`mla_sparse` straight over cache records: window slots and, optionally, chosen entries.

    q: [n, heads, D]; swa_cache, extra_cache: uint8 [P, section_bytes] as in `kv_store`, with
    records of D channels; swa_idx, extra_idx: int64 [n, W] and [n, K] physical slots, -1 for none;
    sink: [heads]. Without the extra cache give None, None and any record name.
    Returns (out [n, heads, D] like q, lse [n, heads]) with the semantics of `mla_sparse`, the keys
    being the dequantised records. A slot past its cache raises IndexError.
    """
    op = "mla_decode_sparse"
    floating(op, q=q, sink=sink)
    integer(op, swa_idx=swa_idx)
    shape(op, "q", q, (None, None, None))
    n, heads, dim = q.shape
    shape(op, "sink", sink, (heads,))
    shape(op, "swa_idx", swa_idx, (n, None))
    check_pages(op, swa_cache, swa_record, dim, q.dtype, swa_entries)
    require(
        (extra_cache is None) == (extra_idx is None),
        op,
        "extra_cache and extra_idx come together or not at all",
    )
    if extra_cache is not None and extra_idx is not None:
        integer(op, extra_idx=extra_idx)
        shape(op, "extra_idx", extra_idx, (n, None))
        check_pages(op, extra_cache, extra_record, dim, q.dtype, extra_entries)
    return kernel(op, q.device)(
        q,
        swa_cache,
        swa_idx,
        swa_record,
        extra_cache,
        extra_idx,
        extra_record,
        sink,
        scale,
        swa_entries,
        extra_entries,
    )
