"""Token ids for tests of the tiny random model."""

from __future__ import annotations

import numpy as np


def tokens(seed: int, length: int) -> np.ndarray:
    """int64 [length], ordinary tokens only."""
    return np.random.default_rng(seed).integers(4, 320, size=length)
