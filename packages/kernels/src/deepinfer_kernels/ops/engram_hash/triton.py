# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`engram_hash`: one program a row; exact 64-bit integers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels.triton_support.launch import launch, power_of_two


@triton.jit
def engram_hash_kernel(
    ids, multipliers, primes, offsets, out, heads, GRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK)
    inside = head < heads
    running = tl.load(ids + row * GRAMS) * tl.load(multipliers)
    for order in tl.static_range(1, GRAMS):
        running = running ^ (tl.load(ids + row * GRAMS + order) * tl.load(multipliers + order))
        at = (order - 1) * heads + head
        prime = tl.load(primes + at, mask=inside, other=1)
        rest = running % prime
        rest = tl.where(rest < 0, rest + prime, rest)
        rest += tl.load(offsets + at, mask=inside, other=0)
        tl.store(out + row * (GRAMS - 1) * heads + at, rest, mask=inside)


def engram_hash(ids: Tensor, multipliers: Tensor, primes: Tensor, offsets: Tensor) -> Tensor:
    n, grams = ids.shape
    heads = primes.shape[1]
    out = ids.new_empty((n, (grams - 1) * heads))
    launch(
        engram_hash_kernel,
        (n,),
        ids.contiguous(),
        multipliers.contiguous(),
        primes.contiguous(),
        offsets.contiguous(),
        out,
        heads,
        GRAMS=grams,
        BLOCK=power_of_two(heads),
    )
    return out
