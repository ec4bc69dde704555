"""Dispatch: each token travels to the ranks that hold its experts. Combine: their outputs return.

A token goes to a rank once, however many of its experts are there. Every expert's output returns by
itself and is added where the token came from, in the order of the token's choices: the sum is the
same bits wherever the experts lie, which a sum made at each rank would not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_kernels.accumulate import acc_dtype
from deepinfer_kernels.checks import floating, integer, require, shape
from deepinfer_kernels.ep.exchange import Exchange

__all__ = ["Dispatched", "ep_combine", "ep_dispatch"]


@dataclass(frozen=True, slots=True)
class ReturnPath:
    """How outputs find back to the tokens they belong to; `ep_combine` reads it.

    order: int64 [M] place on arrival of each assignment.
    back, sent: assignments that came from each rank, and that went to each.
    places: int64 [A] place in [T * k] of each assignment that was sent, in the order of sending.
    tokens, choices: T and k of this rank's own tokens.
    """

    order: Tensor
    back: tuple[int, ...]
    sent: tuple[int, ...]
    places: Tensor
    tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What arrived at this rank: M assignments of a token to a slot, sorted by slot, then by the
    rank and the token they came from.

    x: [M, H] the token of each assignment, in the dtype that was sent.
    slots: int64 [M] local slot of each, 0 .. slots_per_rank - 1.
    weights: [M] weight of each, in the accumulation dtype.
    counts: int64 [slots_per_rank] assignments of each slot.
    """

    x: Tensor
    slots: Tensor
    weights: Tensor
    counts: Tensor
    back: ReturnPath


def ep_dispatch(
    x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int, exchange: Exchange
) -> Dispatched:
    """Send each token to the ranks that hold its experts; collective.

    x: [T, H] tokens of this rank, T >= 0; slots: int64 [T, k], rank r holds slots
    [r * slots_per_rank, (r + 1) * slots_per_rank); weights: [T, k]. H, k and the dtypes are the
    same on every rank, T is not.

    Raises ShapeError, before anything was sent, for arguments that do not fit; ExchangeError where
    a rank was lost.
    """
    op = "ep_dispatch"
    floating(op, x=x, weights=weights)
    integer(op, slots=slots)
    shape(op, "x", x, (None, None))
    shape(op, "slots", slots, (x.shape[0], None))
    shape(op, "weights", weights, slots.shape)
    require(slots_per_rank >= 1, op, f"slots_per_rank is at least 1, got {slots_per_rank}")
    total = slots_per_rank * exchange.size
    if slots.numel():
        low, high = int(slots.min()), int(slots.max())
        require(0 <= low <= high < total, op, f"slots are 0..{total - 1}, got {low}..{high}")
    route = _route(slots, slots_per_rank, exchange.size)
    rows, sent = route.rows, route.sent

    sizes = torch.stack([rows, sent], 1)
    one_each = [1] * exchange.size
    arriving = exchange.all_to_all(sizes, one_each, one_each)
    rows_in, lines_in = arriving[:, 0], arriving[:, 1]

    # Two kinds of rows in one message a rank: tokens, then lines (token, slot, weight).
    wide, hidden = acc_dtype(x.dtype), x.shape[1]
    lines = torch.stack([route.within, slots.reshape(-1)[route.places] % slots_per_rank], 1)
    line_weights = weights.to(wide).reshape(-1)[route.places]
    token_bytes, line_bytes = hidden * x.itemsize, 16 + torch.empty(0, dtype=wide).itemsize
    payload = _interleave(
        _as_bytes(x[route.tokens]),
        torch.cat([_as_bytes(lines), _as_bytes(line_weights[:, None])], 1),
        rows.tolist(),
        sent.tolist(),
    )
    got = exchange.all_to_all(
        payload,
        (rows * token_bytes + sent * line_bytes).tolist(),
        (rows_in * token_bytes + lines_in * line_bytes).tolist(),
    )
    arrived, table = _separate(got, rows_in.tolist(), lines_in.tolist(), token_bytes, line_bytes)
    arrived_x = _from_bytes(arrived, x.dtype, hidden)
    pairs = _from_bytes(table[:, :16], torch.int64, 2)
    arrived_weights = _from_bytes(table[:, 16:], wide, 1)[:, 0]
    base = torch.repeat_interleave(rows_in.cumsum(0) - rows_in, lines_in)
    order = torch.argsort(pairs[:, 1], stable=True)
    local = pairs[order, 1]
    return Dispatched(
        x=arrived_x[(pairs[:, 0] + base)[order]],
        slots=local,
        weights=arrived_weights[order],
        counts=torch.bincount(local, minlength=slots_per_rank),
        back=ReturnPath(
            order=order,
            back=tuple(lines_in.tolist()),
            sent=tuple(sent.tolist()),
            places=route.places,
            tokens=slots.shape[0],
            choices=slots.shape[1],
        ),
    )


def ep_combine(
    y: Tensor, dispatched: Dispatched, exchange: Exchange, residual: Tensor | None = None
) -> Tensor:
    """Return the experts' outputs and add them up for each token; collective.

    y: [M, H], the (weighted) output for each assignment of `dispatched`, in its order. Returns
    [T, H] like y: the sum over a token's k choices, in their order, in the accumulation dtype, plus
    `residual` [T, H]. Raises ShapeError and ExchangeError as `ep_dispatch`.
    """
    op = "ep_combine"
    floating(op, y=y)
    shape(op, "y", y, (dispatched.slots.shape[0], None))
    path = dispatched.back
    tokens, k = path.tokens, path.choices
    hidden = y.shape[1]
    if residual is not None:
        floating(op, residual=residual)
        shape(op, "residual", residual, (tokens, hidden))
    unsorted = torch.empty_like(y, memory_format=torch.contiguous_format)
    unsorted[path.order] = y
    got = exchange.all_to_all(unsorted, path.back, path.sent)
    wide = acc_dtype(y.dtype)
    each = got.new_empty((tokens * k, hidden))
    each[path.places] = got
    each = each.view(tokens, k, hidden)
    out = torch.zeros((tokens, hidden), dtype=wide)
    for choice in range(k):
        out += each[:, choice]
    if residual is not None:
        out += residual.to(wide)
    return out.to(y.dtype)


@dataclass(frozen=True, slots=True)
class _Route:
    """Where this rank's assignments go.

    places: int64 [A] their places in [T * k], sorted by the rank they go to, tokens in order.
    within: int64 [A] which of the tokens sent to the same rank each belongs to.
    tokens: int64 [sum of rows] the tokens to send, by rank; each once a rank.
    rows, sent: int64 [ranks] tokens and assignments that go to each rank.
    """

    places: Tensor
    within: Tensor
    tokens: Tensor
    rows: Tensor
    sent: Tensor


def _route(slots: Tensor, slots_per_rank: int, ranks: int) -> _Route:
    to = slots.reshape(-1) // slots_per_rank
    places = torch.argsort(to, stable=True)
    to, token = to[places], places // max(slots.shape[1], 1)
    # The first assignment of each (rank, token).
    new = torch.ones_like(to, dtype=torch.bool)
    new[1:] = (to[1:] != to[:-1]) | (token[1:] != token[:-1])
    rows = torch.bincount(to[new], minlength=ranks)
    first = rows.cumsum(0) - rows
    within = new.to(torch.int64).cumsum(0) - 1 - first[to]
    return _Route(places, within, token[new], rows, torch.bincount(to, minlength=ranks))


def _as_bytes(rows: Tensor) -> Tensor:
    """[n, w] of any type as uint8 [n, bytes of a row]."""
    n = rows.shape[0]
    if rows.numel() == 0:
        return torch.empty((n, rows.shape[1] * rows.itemsize), dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8).view(n, -1)


def _from_bytes(rows: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """uint8 [n, bytes] as [n, width] of a type."""
    if rows.numel() == 0:
        return torch.empty((rows.shape[0], width), dtype=dtype)
    return rows.contiguous().view(-1).clone().view(dtype).view(-1, width)


def _interleave(
    tokens: Tensor, lines: Tensor, token_counts: Sequence[int], line_counts: Sequence[int]
) -> Tensor:
    """uint8 [bytes]: for each rank its tokens, then its lines."""
    parts: list[Tensor] = []
    for t, n in zip(tokens.split(list(token_counts)), lines.split(list(line_counts)), strict=True):
        parts += [t.reshape(-1), n.reshape(-1)]
    return torch.cat(parts)


def _separate(
    got: Tensor,
    token_counts: Sequence[int],
    line_counts: Sequence[int],
    token_bytes: int,
    line_bytes: int,
) -> tuple[Tensor, Tensor]:
    """The tokens [rows, token_bytes] and lines [lines, line_bytes] of all ranks."""
    tokens: list[Tensor] = []
    lines: list[Tensor] = []
    at = 0
    for t, n in zip(token_counts, line_counts, strict=True):
        tokens.append(got[at : at + t * token_bytes].view(t, token_bytes))
        at += t * token_bytes
        lines.append(got[at : at + n * line_bytes].view(n, line_bytes))
        at += n * line_bytes
    return torch.cat(tokens), torch.cat(lines)
