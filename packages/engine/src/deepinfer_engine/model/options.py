"""Load options, checked against what a family can do."""

from __future__ import annotations

import torch

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.family import LoadOptions

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def arithmetic(options: LoadOptions) -> torch.dtype:
    """Raises ConfigError for an unknown dtype or cache format."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if options.cache_quant not in ("reference", "none"):
        raise ConfigError(f"cache_quant must be 'reference' or 'none', got {options.cache_quant!r}")
    if options.weights not in ("stored", "wide"):
        raise ConfigError(f"weights must be 'stored' or 'wide', got {options.weights!r}")
    return DTYPES[options.dtype]


DEFAULT_BLOCKS = 1024
DEFAULT_POOL_BYTES = 2 << 30
LEAST_BLOCKS = 64


def blocks_of(num_blocks: int | None, block_bytes: int) -> int:
    """Blocks of a pool; unset: 1024, or as many as 2 GiB hold, but at least 64."""
    if num_blocks is not None:
        return num_blocks
    return min(DEFAULT_BLOCKS, max(LEAST_BLOCKS, DEFAULT_POOL_BYTES // max(block_bytes, 1)))


def refuse_replay(options: LoadOptions, family: str) -> None:
    """Raises ConfigError where bounded replay is asked of a model that keeps every token."""
    if options.replay not in ("off", "mask", "compact"):
        raise ConfigError(f"replay must be 'off', 'mask' or 'compact', got {options.replay!r}")
    if options.replay != "off":
        raise ConfigError(
            f"replay {options.replay!r}: a {family} model keeps keys of every layer for every "
            "token, so no layer can be skipped"
        )
