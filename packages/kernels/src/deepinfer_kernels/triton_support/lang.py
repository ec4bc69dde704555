# Kernels are written in Triton's language: their values have no Python types.
# ruff: noqa: ANN001, ANN201
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Functions used inside several kernels: records as integers, activations, selection."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "attend",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "decoded",
    "encode_e2m1",
    "encode_e4m3",
    "encode_pow2_ceil",
    "half_at",
    "nearest",
    "ordered",
    "quantised",
    "record_scale",
    "record_values",
    "scale_value",
    "sigmoid",
    "with_sink",
]


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


# Codes are computed with integers, as on devices that have no float8 at all.


@triton.jit
def encode_e4m3(v):
    """float32 to the E4M3 code, nearest with ties to even, saturating; NaN is 0x7F."""
    bits = v.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    raw = bits & 0x7FFFFFFF
    magnitude = raw.to(tl.float32, bitcast=True)
    # Below 2^-6 the codes are multiples of 2^-9: the float 1.5 * 2^14 has its last place there.
    small = (magnitude + 24576.0).to(tl.int32, bitcast=True) - 0x46C00000
    normal = ((raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20) - 960
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(magnitude >= 448.0, 0x7E, code)
    code = tl.where(raw > 0x7F800000, 0x7F, code)
    return code | sign


@triton.jit
def decode_e4m3(code):
    """E4M3 codes (int32) to float32."""
    magnitude = code & 0x7F
    small = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    bits = tl.where(magnitude < 8, small, (magnitude << 20) + 0x3C000000)
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def encode_e2m1(v):
    """float32 to the E2M1 code, nearest with ties to even, saturating; NaN is 7."""
    bits = v.to(tl.int32, bitcast=True)
    m = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (m > 0.25).to(tl.int32) + (m >= 0.75).to(tl.int32) + (m > 1.25).to(tl.int32)
    code += (m >= 1.75).to(tl.int32) + (m > 2.5).to(tl.int32) + (m >= 3.5).to(tl.int32)
    code += (m > 5.0).to(tl.int32)
    return tl.where(m != m, 7, code) | ((bits >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """E2M1 codes (int32) to float32: 0, .5, 1, 1.5, 2, 3, 4, 6."""
    magnitude = code & 7
    small = tl.where(magnitude == 0, 0, 0x3F000000)
    bits = tl.where(magnitude < 2, small, (magnitude << 22) + 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def encode_pow2_ceil(v):
    """Exponent code of the smallest power of two that is at least v."""
    bits = v.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.minimum(exponent, 255)


@triton.jit
def decode_ue8m0(code):
    """2 ** (code - 127); 0 is 2^-127, 255 is NaN."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def record_scale(amax, RECORD: tl.constexpr):
    """Scale code of a block by its largest magnitude: 0 is fp8, 1 fp4, 2 index_fp4."""
    if RECORD == 0:
        return encode_pow2_ceil(tl.div_rn(tl.where(amax < 1e-4, 1e-4, amax), 448.0))
    elif RECORD == 2:
        floor = 7.052966184176617e-38  # 6 * 2^-126
        return encode_pow2_ceil(tl.div_rn(tl.where(amax < floor, floor, amax), 6.0))
    else:
        return encode_e4m3(tl.div_rn(tl.where(amax < 0.01171875, 0.01171875, amax), 6.0)) & 0xFF


@triton.jit
def scale_value(code, RECORD: tl.constexpr):
    if RECORD == 1:
        return decode_e4m3(code)
    else:
        return decode_ue8m0(code)


@triton.jit
def quantised(v, RECORD: tl.constexpr):
    """(codes [B, N], scale codes [B]) of blocks v [B, N]."""
    # As integers: the order of magnitudes is that of their bits, and a NaN is above them all.
    top = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    code = record_scale(top.to(tl.float32, bitcast=True), RECORD)
    scaled = tl.div_rn(v, tl.broadcast_to(scale_value(code, RECORD)[:, None], v.shape))
    if RECORD == 0:
        return encode_e4m3(scaled), code
    else:
        return encode_e2m1(scaled), code


@triton.jit
def decoded(codes, RECORD: tl.constexpr):
    if RECORD == 0:
        return decode_e4m3(codes)
    else:
        return decode_e2m1(codes)


@triton.jit
def ordered(v):
    """float32 to int64 keys in the order of the values; NaN and -inf are 0, both zeros equal."""
    v = tl.where(v == 0.0, 0.0, v)
    bits = v.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.int64) & 0xFFFFFFFF
    return tl.where((v != v) | (v == float("-inf")), 0, key)


@triton.jit
def record_values(
    cache, slot, present, cols, stride, entries, dim,
    DATA: tl.constexpr, SCALES: tl.constexpr, RECORD: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """float32 [K, D] of the records at slots [K]; 0 where not present. RECORD 3 is raw.

    DATA and SCALES are the bytes of a record's payload and scales, ITEM those of a raw number.
    """
    slot = slot.to(tl.int32)  # a division of 64 bits is a call, with a stack
    page = (slot // entries).to(tl.int64)
    place = slot % entries
    if RECORD == 2:  # all payloads of a page, then all scales
        data = page * stride + place * DATA
        scales = page * stride + entries * DATA + place * SCALES
    else:
        data = page * stride + place * (DATA + SCALES)
        scales = data + DATA
    inside = present[:, None] & (cols < dim)[None, :]
    if RECORD == 3:
        at = cache + data[:, None] + cols[None, :] * ITEM
        bits = tl.load(at, mask=inside, other=0).to(tl.int32)  # records are not aligned
        for byte in tl.static_range(1, ITEM):
            bits = bits | (tl.load(at + byte, mask=inside, other=0).to(tl.int32) << (8 * byte))
        if ITEM == 2:
            bits = bits << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        BLOCK: tl.constexpr = 16 if RECORD == 1 else 32
        if RECORD == 0:
            at = cache + data[:, None] + cols[None, :]
            code = tl.load(at, mask=inside, other=0).to(tl.int32)
        else:
            at = cache + data[:, None] + (cols // 2)[None, :]
            code = tl.load(at, mask=inside, other=0).to(tl.int32)
            code = (code >> ((cols % 2) * 4)[None, :]) & 15
        at = cache + scales[:, None] + (cols // BLOCK)[None, :]
        scale = tl.load(at, mask=inside, other=0).to(tl.int32)
        return tl.where(inside, decoded(code, RECORD) * scale_value(scale, RECORD), 0.0)


@triton.jit
def attend(q, keys, values, seen, peak, total, sums, scale):
    """One step of softmax attention: q [M, D], keys and values [K, D], seen [M, K].

    Returns (largest logit [M], sum of weights [M], weighted values [M, D]). Narrow weights are
    taken in two parts, so that their rounding stays below that of the result.
    """
    if keys.dtype == tl.float32:
        logits = tl.dot(q, tl.trans(keys), input_precision="ieee")
    else:
        logits = tl.dot(q, tl.trans(keys))
    logits = tl.where(seen, logits * scale, float("-inf"))
    new = tl.maximum(peak, tl.max(logits, axis=1))
    bound = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(logits - bound[:, None])
    shrink = tl.exp(peak - bound)
    total = total * shrink + tl.sum(weights, axis=1)
    sums = sums * shrink[:, None]
    if values.dtype == tl.float32:
        sums += tl.dot(weights, values, input_precision="ieee")
    else:
        high = weights.to(values.dtype)
        sums += tl.dot(high, values)
        sums += tl.dot((weights - high.to(tl.float32)).to(values.dtype), values)
    return new, total, sums


@triton.jit
def with_sink(peak, total, sums, sink):
    """(outputs [M, D], lse [M]): the sink only divides; no key at all gives 0, inf."""
    bound = tl.where(peak == float("-inf"), 0.0, peak)
    empty = total == 0.0
    denominator = tl.where(empty, 1.0, total + tl.exp(sink - bound))
    lse = tl.where(empty, float("inf"), tl.log(tl.where(empty, 1.0, total)) + bound)
    return tl.where(empty[:, None], 0.0, sums / denominator[:, None]), lse


@triton.jit
def nearest(v):
    """Whole numbers, ties to even, for magnitudes below 2 ** 22."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def half_at(pointers, mask):
    """float16 at byte addresses of any alignment, as float32."""
    low = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    high = tl.load(pointers + 1, mask=mask, other=0).to(tl.int32)
    return (low | (high << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
