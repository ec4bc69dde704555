"""The few heavy operations on [B, V] matrices, for numpy and for torch.

Everything indexed by request or draft is small and stays in numpy on the host; only what has a
vocabulary axis goes through here, and stays on the device it came from.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Float, Int, to_host, unpack_bits
from deepinfer_dspark.errors import ShapeError


class Backend(Protocol):
    """Matrix operations; `x` is [n, V], index arrays and results without V are host numpy."""

    def copy(self, x: Any) -> Any: ...
    def widen(self, x: Any) -> Any: ...
    def take(self, x: Any, rows: Int) -> Any: ...
    def argmax(self, x: Any) -> tuple[Int, npt.NDArray[np.bool_]]: ...
    def normaliser(self, x: Any) -> Float: ...
    def gather(self, x: Any, rows: Int, cols: Int) -> Float: ...
    def add_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None: ...
    def set_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None: ...
    def mask_rows(self, x: Any, allowed: Any) -> Any: ...
    def scale_rows(self, x: Any, by: Float) -> Any: ...
    def truncate(self, x: Any, top_p: Float, top_k: Int, min_p: Float) -> Any: ...
    def probabilities(self, x: Any) -> Any: ...
    def subtract_clipped(self, p: Any, q: Any) -> Any: ...
    def draw(self, p: Any, u: Float) -> Int: ...
    def add_gumbel(self, x: Any, seeds: Any, positions: Int) -> Any: ...
    def coupled_argmax(
        self, x: Any, seeds: Any, positions: Int
    ) -> tuple[Int, npt.NDArray[np.bool_]]: ...
    def top(self, x: Any, k: int) -> tuple[Int, Float]: ...
    def mass(self, q: Any) -> tuple[Float, Float]: ...


def backend_of(x: Any) -> Backend:
    """The backend that owns `x`; torch is looked up only if it is already imported."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from deepinfer_dspark.backend_torch import TorchBackend

        return TorchBackend()
    return NumpyBackend()


class NumpyBackend:
    """Reference backend; float64 wherever a probability leaves a row."""

    def copy(self, x: Any) -> Any:
        return np.array(x, copy=True)

    def widen(self, x: Any) -> Any:
        """`x` in float32 or float64: half precision is storage, never arithmetic."""
        if x.dtype in (np.float32, np.float64):
            return x
        if x.dtype.kind not in "fiub":
            raise ShapeError(f"want logits of real numbers, got dtype {x.dtype}")
        return x.astype(np.float32 if x.dtype == np.float16 else np.float64)

    def take(self, x: Any, rows: Int) -> Any:
        return x[rows]

    def argmax(self, x: Any) -> tuple[Int, npt.NDArray[np.bool_]]:
        """Largest entry of each row, lowest id on ties, and whether the row has a finite one."""
        ids = x.argmax(axis=1)  # the first of NaNs if there is one: reported as not finite
        return ids, np.isfinite(x[np.arange(ids.size), ids])

    def normaliser(self, x: Any) -> Float:
        """log sum exp of each row; -inf for a row without support, NaN for a broken one."""
        top = x.max(axis=1, keepdims=True)
        safe = np.where(np.isfinite(top), top, 0.0).astype(x.dtype)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            mass = np.exp(x - safe).sum(axis=1, dtype=np.float64)
            total: Float = np.log(mass) + safe[:, 0]
        return total

    def gather(self, x: Any, rows: Int, cols: Int) -> Float:
        return x[rows, cols].astype(np.float64)

    def add_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None:
        x[rows, cols] += values.astype(x.dtype)

    def set_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None:
        x[rows, cols] = values.astype(x.dtype)

    def mask_rows(self, x: Any, allowed: Any) -> Any:
        mask = np.asarray(to_host(allowed))
        if mask.dtype != np.bool_:
            mask = unpack_bits(mask, x.shape[1])
        return np.where(mask, x, -np.inf).astype(x.dtype, copy=False)

    def scale_rows(self, x: Any, by: Float) -> Any:
        """(x - largest of its row) / by: without the shift a small `by` overflows."""
        top = x.max(axis=1, keepdims=True)
        with np.errstate(over="ignore"):  # far below the largest entry: exp of it is 0 either way
            scaled: Any = (x - np.where(np.isfinite(top), top, 0)) / by.astype(x.dtype)[:, None]
        return scaled

    def truncate(self, x: Any, top_p: Float, top_k: Int, min_p: Float) -> Any:
        """Top-p, then top-k of what is left, then min-p; dropped entries become -inf.

        A token is dropped by top-p when the mass before it exceeds top_p. Ties keep the lower id.
        """
        order = np.argsort(-x, axis=1, kind="stable")
        ranked = np.take_along_axis(x, order, axis=1)
        p = self.probabilities(ranked)
        before = np.cumsum(p, axis=1) - p
        keep = before <= top_p[:, None]
        keep &= np.arange(x.shape[1])[None, :] < top_k[:, None]
        keep &= p >= min_p[:, None] * p[:, :1]
        out = np.full_like(x, -np.inf)
        np.put_along_axis(out, order, np.where(keep, ranked, -np.inf).astype(x.dtype), axis=1)
        return out

    def probabilities(self, x: Any) -> Any:
        """Softmax of each row in float64."""
        wide = x.astype(np.float64)
        with np.errstate(invalid="ignore"):
            e = np.exp(wide - wide.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def subtract_clipped(self, p: Any, q: Any) -> Any:
        """max(p - q, 0) per entry; a row left without mass becomes p again."""
        residual = np.maximum(p - np.asarray(q, dtype=np.float64), 0.0)
        empty = residual.sum(axis=1) <= 0.0
        residual[empty] = p[empty]
        return residual

    def draw(self, p: Any, u: Float) -> Int:
        """Invert the float64 CDF of each (unnormalised) row at u in [0, 1)."""
        cdf = np.cumsum(p, axis=1, dtype=np.float64)
        # u * total may round up to total: step back so that the answer always has mass
        target = np.minimum(u * cdf[:, -1], np.nextafter(cdf[:, -1], 0.0))
        return (cdf <= target[:, None]).sum(axis=1)

    def add_gumbel(self, x: Any, seeds: Any, positions: Int) -> Any:
        from deepinfer_dspark.uniforms import gumbel_noise

        return x.astype(np.float64) + gumbel_noise(seeds, positions, x.shape[1])

    def coupled_argmax(
        self, x: Any, seeds: Any, positions: Int
    ) -> tuple[Int, npt.NDArray[np.bool_]]:
        """`argmax(add_gumbel(x, seeds, positions))`."""
        return self.argmax(self.add_gumbel(x, seeds, positions))

    def top(self, x: Any, k: int) -> tuple[Int, Float]:
        order = np.argsort(-x, axis=1, kind="stable")[:, :k]
        return order, np.take_along_axis(x, order, axis=1).astype(np.float64)

    def mass(self, q: Any) -> tuple[Float, Float]:
        """Sum and smallest entry over the last axis; NaN where the row holds one."""
        with np.errstate(invalid="ignore", over="ignore"):
            return q.sum(axis=-1).astype(np.float64), q.min(axis=-1).astype(np.float64)
