# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Exact selection in a kernel: the k-th largest of a row by counting digits."""

from __future__ import annotations

import triton
import triton.language as tl

from deepinfer_kernels.triton_support.lang import ordered

__all__ = ["radix_threshold", "taken_of"]


@triton.jit
def radix_threshold(base, N, k, BLOCK: tl.constexpr):
    """(key of the k-th largest of N values, how many equal to it still belong to the k).

    Four passes over the row, a byte of the key each. Keys of 0 (NaN, -inf) are never counted: with
    fewer than k others the threshold is 0 and every other value is above it.
    """
    prefix = tl.zeros((), dtype=tl.int64)
    left = tl.zeros((), dtype=tl.int32) + k
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        counts = tl.zeros((256,), dtype=tl.int32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            v = tl.load(base + cols, mask=cols < N, other=float("-inf")).to(tl.float32)
            key = ordered(v)
            match = ((key > 0) & ((key >> (32 - 8 * step)) == prefix)).to(tl.int32)
            digit = ((key >> (24 - 8 * step)) & 255).to(tl.int32)
            # No mask, which Ascend's Triton does not have: what does not match is a 0 too many.
            others = BLOCK - tl.sum(match, axis=0)
            counts += tl.histogram(digit * match, 256) - tl.where(digits == 0, others, 0)
        above = tl.cumsum(counts, axis=0, reverse=True) - counts  # of greater digits
        here = (above < left) & (above + counts >= left)
        found = tl.sum(here.to(tl.int32), axis=0)
        chosen = tl.sum(tl.where(here, digits, 0), axis=0)
        passed = tl.sum(tl.where(here, above, 0), axis=0)
        left = tl.where(found > 0, left - passed, left)
        prefix = tl.where(found > 0, prefix * 256 + chosen.to(tl.int64), -1)
    return tl.where(prefix < 0, 0, prefix), left


@triton.jit
def taken_of(key, threshold, ties, tied):
    """(which of these keys belong to the k, which equal the threshold) after ``tied`` equal ones
    before them: of equal values the earlier are taken."""
    equal = ((key == threshold) & (key > 0)).to(tl.int32)
    before = tied + tl.cumsum(equal, axis=0) - equal
    return ((key > threshold) & (key > 0)) | ((equal > 0) & (before < ties)), equal
