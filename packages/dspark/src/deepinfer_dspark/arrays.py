"""Small arrays on the host, whatever they came as: below both backends."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


def to_host(x: Any) -> npt.NDArray[Any]:
    """A small array as numpy, whatever it was."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        tensor: Any = x.detach().cpu()
        # numpy has none of torch's narrow formats but float16
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        return tensor.float().numpy() if narrow else tensor.numpy()
    return np.asarray(x)


def unpack_bits(packed: npt.NDArray[Any], vocab: int) -> npt.NDArray[np.bool_]:
    """Grammar masks as int32 words, bit i of word w = token 32 w + i, to bool [B, V]."""
    words = np.ascontiguousarray(packed).astype(np.int32, copy=False).view(np.uint8)
    return np.unpackbits(words, axis=1, bitorder="little")[:, :vocab].astype(np.bool_)
