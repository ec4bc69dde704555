"""The torch twin of `backend.NumpyBackend`: same results, on the device of the logits."""

from __future__ import annotations

import math
from functools import lru_cache
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


def _top53(x: torch.Tensor) -> torch.Tensor:
    """Top 53 bits of SplitMix64's finaliser; int64 that wraps like uint64. Overwrites x.

    In place: of a row of a vocabulary it takes a quarter of the time that new tensors take.
    """
    shifted = torch.empty_like(x)
    for bits, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1)).mul_(factor)
    return x.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)


HEADS = (1024, 8192)
"""Largest entries of a row that are ranked before all of it is sorted."""
SHORT = 4096
"""Vocabularies up to this are sorted and drawn for as a whole: fewer operations."""
FAR = 4.0
FAR_BITS = math.floor(math.exp(-math.exp(-FAR)) * 2**53) - 1024
"""Gumbel noise of FAR or more comes from 53 bits of at least this; so do 2% of all."""


def _base(x: torch.Tensor, seeds: Any, positions: Int) -> torch.Tensor:
    """int64 [n]: the key of each row's Gumbel noise."""
    return torch.from_numpy(counter_bits("gumbel", seeds, positions).view(np.int64)).to(x.device)


def _uniform_bits(base: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """53 random bits, int64, of token `ids` under each key; shapes broadcast."""
    return _top53(base + (ids + 1) * _GOLDEN)


@lru_cache(4)
def _steps(vocab: int, device: torch.device) -> torch.Tensor:
    """int64 [1, vocab]: what each token id adds to a key. Nobody writes it."""
    return (torch.arange(1, vocab + 1, dtype=torch.int64, device=device) * _GOLDEN)[None, :]


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    return bits.double().add_(0.5).mul_(2.0**-53).log_().neg_().log_().neg_()


def _head(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the n largest entries of each row, falling, equal ones by id.

    Which of those equal to the smallest are among them is left open."""
    ids = x.topk(n, dim=1, sorted=False).indices.sort(dim=1).values
    values, at = x.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, at)


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
        if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
            # numpy's is the first of equal entries, or of those that are none, in one pass
            rows = x.detach().numpy()
            first = rows.argmax(axis=1)
            return first, np.isfinite(rows[np.arange(len(rows)), first])
        # torch does not promise which of equal entries argmax returns: take the first by hand
        top = x.amax(dim=1, keepdim=True)
        hit = (x == top) | torch.isnan(x)
        return _first_true(hit).cpu().numpy(), torch.isfinite(top[:, 0]).cpu().numpy()

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
        top = x.amax(dim=1, keepdim=True).nan_to_num_(0.0, 0.0, 0.0)
        return (x - top).div_(torch.from_numpy(by).to(x)[:, None])

    def truncate(self, x: Any, top_p: Float, top_k: Int, min_p: Float) -> Any:
        """What is kept nearly always lies among the largest few: only other rows are sorted."""
        if x.shape[1] <= SHORT:
            return self._truncate_sorted(x, top_p, top_k, min_p)
        out = torch.full_like(x, float("-inf"))
        at = torch.arange(x.shape[0], device=x.device)
        top = x.amax(dim=1, keepdim=True).double()
        mass = (x.double() - top).exp_().sum(dim=1, keepdim=True)
        for n in HEADS:
            if 4 * n > x.shape[1] or not at.numel():
                break
            ranked, order = _head(x[at], n)
            p = (ranked.double() - top[at]).exp_() / mass[at]
            own = at.cpu().numpy()
            keep = self._kept(p, top_p[own], top_k[own], min_p[own]) & (ranked > float("-inf"))
            count = keep.sum(dim=1, keepdim=True)
            # The place of an entry is certain where it is above the smallest of the head.
            last = ranked.gather(1, (count - 1).clamp(min=0))
            sure = ((count == 0) | (last > ranked[:, -1:]))[:, 0]
            done = out.new_full((int(sure.sum()), x.shape[1]), float("-inf"))
            kept = ranked.masked_fill(~keep, float("-inf"))[sure]
            out[at[sure]] = done.scatter_(1, order[sure], kept)
            at = at[~sure]
        if at.numel():
            own = at.cpu().numpy()
            out[at] = self._truncate_sorted(x[at], top_p[own], top_k[own], min_p[own])
        return out

    def _truncate_sorted(self, x: Any, top_p: Float, top_k: Int, min_p: Float) -> Any:
        ranked, order = torch.sort(x, dim=1, descending=True, stable=True)
        keep = self._kept(self.probabilities(ranked), top_p, top_k, min_p)
        out = torch.full_like(x, float("-inf"))
        return out.scatter_(1, order, ranked.masked_fill(~keep, float("-inf")))

    @staticmethod
    def _kept(p: torch.Tensor, top_p: Float, top_k: Int, min_p: Float) -> torch.Tensor:
        """Which entries of falling probabilities stay."""
        before = torch.cumsum(p, dim=1) - p
        keep = before <= torch.from_numpy(top_p).to(p)[:, None]
        ranks = torch.arange(p.shape[1], device=p.device)[None, :]
        keep &= ranks < torch.from_numpy(top_k).to(p.device)[:, None]
        return keep & (p >= torch.from_numpy(min_p).to(p)[:, None] * p[:, :1])

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
        keys = _base(x, seeds, positions)[:, None] + _steps(x.shape[1], x.device)
        return _gumbel(_top53(keys)).add_(x)

    def coupled_argmax(
        self, x: Any, seeds: Any, positions: Int
    ) -> tuple[Int, npt.NDArray[np.bool_]]:
        """`argmax(add_gumbel(x, seeds, positions))`, with logarithms for few entries only.

        An entry far below the best known sum needs noise above FAR, which integer bits tell.
        """
        if x.shape[1] <= SHORT:
            return self.argmax(self.add_gumbel(x, seeds, positions))
        base = _base(x, seeds, positions)
        leader, first = x.max(dim=1)
        alive = torch.isfinite(leader)
        # A truncated law is short as it is; looking at some entries is enough to tell.
        if not torch.isinf(x[:, ::64]).float().mean() > 0.75:
            known = leader.double() + _gumbel(_uniform_bits(base, first))
            far = (known - FAR - 1e-3).to(x.dtype)  # rounds to a little below, never above
            every = _steps(x.shape[1], x.device)[0]
            there = torch.empty(x.shape, dtype=torch.bool, device=x.device)
            for i in range(x.shape[0]):  # a row at a time stays in the processor's cache
                there[i] = _top53(every + base[i]) >= FAR_BITS
            there |= x >= far[:, None]
            there &= x > float("-inf")
        else:
            there = x > float("-inf")
        rows, ids = torch.nonzero(there, as_tuple=True)
        sums = x[rows, ids].double() + _gumbel(_uniform_bits(base[rows], ids))
        best = torch.full((x.shape[0],), float("-inf"), dtype=torch.float64, device=x.device)
        best.scatter_reduce_(0, rows, sums, "amax")
        choice = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
        hit = sums == best[rows]
        choice.scatter_reduce_(0, rows[hit], ids[hit], "amin")
        return torch.where(alive, choice, 0).cpu().numpy(), alive.cpu().numpy()

    def top(self, x: Any, k: int) -> tuple[Int, Float]:
        n = 2 * k + 32
        if x.shape[1] <= 4 * n:
            values, ids = torch.sort(x, dim=1, descending=True, stable=True)
        else:
            values, ids = _head(x, n)
            unsure = torch.nonzero(~(values[:, k - 1] > values[:, -1]))[:, 0]
            if unsure.numel():
                ranked, at = torch.sort(x[unsure], dim=1, descending=True, stable=True)
                values[unsure], ids[unsure] = ranked[:, :n], at[:, :n]
        return ids[:, :k].cpu().numpy(), values[:, :k].double().cpu().numpy()

    def mass(self, q: Any) -> tuple[Float, Float]:
        return q.sum(dim=-1).double().cpu().numpy(), q.amin(dim=-1).double().cpu().numpy()

    @staticmethod
    def _ids(index: Int, like: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(index)).to(like.device)


def _first_true(hit: torch.Tensor) -> torch.Tensor:
    ranks = torch.arange(hit.shape[1], device=hit.device)
    return torch.where(hit, ranks, hit.shape[1]).amin(dim=1).clamp_(max=hit.shape[1] - 1)
