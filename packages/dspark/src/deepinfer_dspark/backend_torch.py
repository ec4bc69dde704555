"""The torch twin of `backend.NumpyBackend`: same results, on the device of the logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepinfer_dspark.arrays import Float, Int, to_host, unpack_bits
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.uniforms import counter_bits


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64 finaliser on int64: wraps like uint64; right shifts are made logical."""

    def shift(v: torch.Tensor, n: int) -> torch.Tensor:
        return (v >> n) & ((1 << (64 - n)) - 1)

    x = (x ^ shift(x, 30)) * _MIX1
    x = (x ^ shift(x, 27)) * _MIX2
    return x ^ shift(x, 31)


class TorchBackend:
    """`x` is a torch tensor [n, V]; index arrays arrive and leave as host numpy."""

    def copy(self, x: Any) -> Any:
        return x.clone()

    def widen(self, x: Any) -> Any:
        if x.dtype in (torch.float32, torch.float64):
            return x
        if x.dtype.is_complex:
            raise ShapeError(f"want logits of real numbers, got dtype {x.dtype}")
        return x.float() if x.dtype.is_floating_point else x.double()

    def take(self, x: Any, rows: Int) -> Any:
        return x[self._ids(rows, x)]

    def argmax(self, x: Any) -> tuple[Int, npt.NDArray[np.bool_]]:
        # torch does not promise which of equal entries argmax returns: take the first by hand
        top = x.amax(dim=1, keepdim=True)
        hit = (x == top) | torch.isnan(x)
        ids = hit.to(torch.int8).argmax(dim=1) if x.device.type == "cpu" else _first_true(hit)
        return ids.cpu().numpy(), torch.isfinite(top[:, 0]).cpu().numpy()

    def normaliser(self, x: Any) -> Float:
        top = x.amax(dim=1, keepdim=True)
        safe = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        mass = torch.exp(x - safe).sum(dim=1, dtype=torch.float64)
        return (torch.log(mass) + safe[:, 0].double()).cpu().numpy()

    def gather(self, x: Any, rows: Int, cols: Int) -> Float:
        return x[self._ids(rows, x), self._ids(cols, x)].double().cpu().numpy()

    def add_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None:
        at = (self._ids(rows, x), self._ids(cols, x))
        x[at] += torch.from_numpy(values).to(x)

    def set_at(self, x: Any, rows: Int, cols: Int, values: Float) -> None:
        x[self._ids(rows, x), self._ids(cols, x)] = torch.from_numpy(values).to(x)

    def mask_rows(self, x: Any, allowed: Any) -> Any:
        if isinstance(allowed, torch.Tensor) and allowed.dtype == torch.bool:
            mask = allowed.to(x.device)
        else:
            host = to_host(allowed)
            bits = host if host.dtype == np.bool_ else unpack_bits(host, x.shape[1])
            mask = torch.from_numpy(np.ascontiguousarray(bits)).to(x.device)
        return x.masked_fill(~mask, float("-inf"))

    def scale_rows(self, x: Any, by: Float) -> Any:
        top = x.amax(dim=1, keepdim=True)
        top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
        return (x - top) / torch.from_numpy(by).to(x)[:, None]

    def truncate(self, x: Any, top_p: Float, top_k: Int, min_p: Float) -> Any:
        ranked, order = torch.sort(x, dim=1, descending=True, stable=True)
        p = self.probabilities(ranked)
        before = torch.cumsum(p, dim=1) - p
        keep = before <= torch.from_numpy(top_p).to(p)[:, None]
        ranks = torch.arange(x.shape[1], device=x.device)[None, :]
        keep &= ranks < torch.from_numpy(top_k).to(x.device)[:, None]
        keep &= p >= torch.from_numpy(min_p).to(p)[:, None] * p[:, :1]
        out = torch.full_like(x, float("-inf"))
        return out.scatter_(1, order, ranked.masked_fill(~keep, float("-inf")))

    def probabilities(self, x: Any) -> Any:
        return torch.softmax(x.double(), dim=1)

    def subtract_clipped(self, p: Any, q: Any) -> Any:
        law = torch.as_tensor(q, device=p.device).to(p.dtype)
        residual = torch.clamp(p - law, min=0.0)
        empty = residual.sum(dim=1, keepdim=True) <= 0.0
        return torch.where(empty, p, residual)

    def draw(self, p: Any, u: Float) -> Int:
        cdf = torch.cumsum(p, dim=1, dtype=torch.float64)
        total = cdf[:, -1]
        below = torch.nextafter(total, torch.zeros_like(total))
        target = torch.minimum(torch.from_numpy(u).to(cdf.device) * total, below)
        return (cdf <= target[:, None]).sum(dim=1).cpu().numpy()

    def add_gumbel(self, x: Any, seeds: Any, positions: Int) -> Any:
        base = torch.from_numpy(counter_bits("gumbel", seeds, positions).view(np.int64))
        ids = torch.arange(1, x.shape[1] + 1, dtype=torch.int64, device=x.device)[None, :]
        bits = _mix64(base.to(x.device)[:, None] + ids * _GOLDEN)
        top53 = (bits >> 11) & ((1 << 53) - 1)
        u = (top53.double() + 0.5) * 2.0**-53
        return x.double() - torch.log(-torch.log(u))

    def top(self, x: Any, k: int) -> tuple[Int, Float]:
        values, ids = torch.sort(x, dim=1, descending=True, stable=True)
        return ids[:, :k].cpu().numpy(), values[:, :k].double().cpu().numpy()

    def mass(self, q: Any) -> tuple[Float, Float]:
        return q.sum(dim=-1).double().cpu().numpy(), q.amin(dim=-1).double().cpu().numpy()

    @staticmethod
    def _ids(index: Int, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(like.device)


def _first_true(hit: torch.Tensor) -> torch.Tensor:
    ranks = torch.arange(hit.shape[1], device=hit.device)
    return torch.where(hit, ranks, hit.shape[1]).amin(dim=1).clamp_(max=hit.shape[1] - 1)
