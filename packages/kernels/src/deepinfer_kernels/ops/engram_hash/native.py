"""`engram_hash` in C++ (native.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.native.call import LIBRARY, dense, plain


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    plain(ids, multipliers, primes, offsets)
    ids, multipliers = dense(ids), dense(multipliers)
    primes, offsets = dense(primes), dense(offsets)
    n, grams = ids.shape
    heads = primes.shape[1]
    out = ids.new_empty((n, (grams - 1) * heads), dtype=torch.int64)
    status = LIBRARY.di_engram_hash(
        ids.data_ptr(),
        multipliers.data_ptr(),
        primes.data_ptr(),
        offsets.data_ptr(),
        n,
        grams,
        heads,
        out.data_ptr(),
    )
    if status:
        raise ShapeError("engram_hash: every prime is at least 1")
    return out
