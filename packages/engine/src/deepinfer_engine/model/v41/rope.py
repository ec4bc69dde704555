"""Rotary angles: cos and sin by position, for plain and for YaRN-scaled layers."""

from __future__ import annotations

import math

import numpy as np
import torch

from deepinfer_engine.model.v41.config import TextConfig


def inverse_frequencies(config: TextConfig, *, compressed: bool) -> torch.Tensor:
    """float64 [R/2]: the rotation per position of each channel pair.

    Layers without compressed entries use `rope_theta` unscaled; the others `compress_rope_theta`
    with the YaRN interpolation of Peng et al. 2023 (no attention scaling).
    """
    rope_dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    pair = torch.arange(rope_dim // 2, dtype=torch.float64)
    base = theta ** (-2.0 * pair / rope_dim)
    scaling = config.rope_scaling
    if not compressed or scaling is None:
        return base

    def channel(rotations: float) -> float:
        span = scaling.original_max_position_embeddings / (2 * math.pi * rotations)
        return rope_dim * math.log(span) / (2 * math.log(theta))

    low = max(math.floor(channel(scaling.beta_fast)), 0)
    high = min(math.ceil(channel(scaling.beta_slow)), rope_dim - 1)
    width = (high - low) if high != low else 0.001
    ramp = ((pair - low) / width).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)


class Rope:
    """Angles by position for one of the two frequency sets; nothing is tabulated, so any position
    is legal."""

    def __init__(self, config: TextConfig, *, compressed: bool, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(config, compressed=compressed).numpy()
        self._dtype = np.float64 if dtype == torch.float64 else np.float32

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [n, R/2], at int64 positions [n]."""
        angles = positions.numpy()[:, None] * self._frequencies  # float64
        cos, sin = np.cos(angles), np.sin(angles)
        return (
            torch.from_numpy(cos.astype(self._dtype, copy=False)),
            torch.from_numpy(sin.astype(self._dtype, copy=False)),
        )
