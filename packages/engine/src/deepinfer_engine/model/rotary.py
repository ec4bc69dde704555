"""Rotary position embedding of the `rotate_half` kind: frequencies and angles by position.

Channel `i` turns with channel `i + d/2`. Kinds as in released configs: default, linear, llama3
(long wavelengths slowed down, a ramp between), yarn (Peng et al. 2023), and factors (a divisor of
each frequency, as GGUF files hold it).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepinfer_engine.errors import CheckpointError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class RopeScaling(BaseModel):
    """`rope_scaling`, or `rope_parameters` without the base."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: RopeKind = "default"
    factor: float = Field(1.0, ge=1, le=1e6)
    original_max_position_embeddings: int | None = Field(None, gt=0)
    low_freq_factor: float = Field(1.0, gt=0, le=1e6)
    high_freq_factor: float = Field(4.0, gt=0, le=1e6)
    beta_fast: float = Field(32.0, gt=0, le=1e6)
    beta_slow: float = Field(1.0, gt=0, le=1e6)
    attention_factor: float | None = Field(None, gt=0, le=1e3)
    mscale: float | None = Field(None, ge=0, le=1e3)
    mscale_all_dim: float | None = Field(None, ge=0, le=1e3)
    truncate: bool = True
    frequency_factors: tuple[Annotated[float, Field(gt=0, le=1e9)], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        if self.rope_type == "llama3":
            if self.original_max_position_embeddings is None:
                raise ValueError("rope_type llama3 needs original_max_position_embeddings")
            if self.low_freq_factor >= self.high_freq_factor:
                raise ValueError("low_freq_factor must be below high_freq_factor")
        return self


class Rotary:
    """Angles by position; nothing is tabulated, so any position is legal."""

    def __init__(
        self, dim: int, theta: float, scaling: RopeScaling | None, max_positions: int, *, wide: bool
    ) -> None:
        """`wide`: float64 angles, for a float64 model."""
        self._frequencies, self._amplitude = _frequencies(dim, theta, scaling, max_positions)
        self._dtype = np.float64 if wide else np.float32

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(cos, sin), each [n, dim/2], at int64 positions [n]."""
        angles = positions[:, None] * self._frequencies
        cos, sin = np.cos(angles) * self._amplitude, np.sin(angles) * self._amplitude
        return cos.astype(self._dtype, copy=False), sin.astype(self._dtype, copy=False)


def _frequencies(
    dim: int, theta: float, scaling: RopeScaling | None, max_positions: int
) -> tuple[Floats, float]:
    """(float64 [dim/2] turns per position, factor on cosine and sine)."""
    base = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling is None or scaling.rope_type == "default":
        return base, 1.0
    if scaling.rope_type == "linear":
        return base / scaling.factor, 1.0
    if scaling.rope_type == "factors":
        if len(scaling.frequency_factors) != dim // 2:
            raise CheckpointError(
                f"rope_scaling has {len(scaling.frequency_factors)} frequency_factors, a head of "
                f"{dim} channels needs {dim // 2}"
            )
        return base / np.array(scaling.frequency_factors), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(base, scaling), 1.0
    return _yarn(base, dim, theta, scaling, max_positions)


def _llama3(base: Floats, s: RopeScaling) -> Floats:
    assert s.original_max_position_embeddings is not None
    turns = s.original_max_position_embeddings * base / (2 * math.pi)
    # 0 where fewer turns than low_freq_factor fit the original length, 1 from high_freq_factor on.
    kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return base * kept + base / s.factor * (1 - kept)


def _yarn(
    base: Floats, dim: int, theta: float, s: RopeScaling, max_positions: int
) -> tuple[Floats, float]:
    original = s.original_max_position_embeddings or max_positions

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / width, 0, 1)
    return base / s.factor * ramp + base * (1 - ramp), _yarn_amplitude(s)


def _yarn_amplitude(s: RopeScaling) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return mscale(s.mscale) / mscale(s.mscale_all_dim)
    return mscale(1.0)
