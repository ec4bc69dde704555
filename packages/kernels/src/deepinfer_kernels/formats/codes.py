"""The number codes inside a cache record: E4M3, E2M1 and the power-of-two scale UE8M0.

Everything here works on float32 and is exact: rounding is to nearest, ties to the even code, and
values past the largest finite code saturate. A NaN stays NaN where the code has one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def e4m3_values(device: torch.device) -> Tensor:
    """float32 [256]: the value of each E4M3 byte."""
    codes = torch.arange(256, dtype=torch.int16, device=device).to(torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


@cache
def e2m1_values(device: torch.device) -> Tensor:
    """float32 [16]: the value of each E2M1 nibble; bit 3 is the sign, so code 8 is -0.0."""
    positive = torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


@cache
def e2m1_byte_values(device: torch.device) -> Tensor:
    """float32 [256, 2]: the two values of each byte; the even channel is the low nibble."""
    codes = torch.arange(256, device=device)
    return e2m1_values(device)[torch.stack((codes & 15, codes >> 4), dim=-1)]


@cache
def ue8m0_values(device: torch.device) -> Tensor:
    """float32 [256]: 2^(byte - 127); byte 255 is NaN."""
    exponents = torch.arange(256, dtype=torch.float64, device=device) - 127
    values = torch.exp2(exponents)
    values[255] = torch.nan
    return values.to(torch.float32)


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 [...] to uint8 [...], saturating at +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


@cache
def _e2m1_thresholds(device: torch.device) -> Tensor:
    """float32 [7]: the smallest magnitude that takes each code above 0.

    A midpoint belongs to its even neighbour. Where that is the lower code (0.25, 1.25, 2.5, 5) the
    next float upwards is the first that rounds up.
    """
    ties_down = torch.tensor([0.25, 1.25, 2.5, 5.0], device=device)
    ties_up = torch.tensor([0.75, 1.75, 3.5], device=device)
    above = torch.nextafter(ties_down, torch.full_like(ties_down, torch.inf))
    return torch.cat((above, ties_up)).sort().values


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 [...] to uint8 [...] codes 0..15, saturating at +-6. NaN takes code 7."""
    magnitude = x.abs().contiguous()
    code = torch.bucketize(magnitude, _e2m1_thresholds(x.device), right=True, out_int32=True)
    return (code + 8 * x.signbit()).to(torch.uint8)


def encode_pow2_ceil(x: Tensor) -> Tensor:
    """uint8 UE8M0 code of the smallest power of two >= x, for positive normal float32 x.

    Read from the float's bits: log2 followed by ceil is off by one at exact powers of two.
    inf and NaN take 255, which decodes to NaN.
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) & 255
    return (exponent + ((bits & 0x7FFFFF) != 0)).clamp(max=255).to(torch.uint8)
