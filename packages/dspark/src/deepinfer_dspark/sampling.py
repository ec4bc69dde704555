"""From logits to the law a token is drawn from, for the rows of a ragged verify batch.

Order: penalties (counts include the drafts before the row), logit bias, bans and min-tokens,
grammar mask, temperature, top-p, top-k, min-p, softmax. Temperature 0 is argmax, lowest id on ties.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.arrays import Float, Int, to_host
from deepinfer_dspark.backend import Backend
from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.ragged import RaggedIds


@dataclass(frozen=True, slots=True)
class Penalties:
    """Counts of tokens seen so far and what they cost, per request.

    output:     RaggedIds with values = times each id occurs in the committed output.
    prompt:     RaggedIds of ids that occur in the prompt (repetition alone looks at them), or None.
    presence, frequency: float [R]; subtracted once, and per occurrence, for ids of the output.
    repetition: float [R]; 1 = off. Positive logits of seen ids are divided by it, others
                multiplied.
    """

    output: RaggedIds
    presence: npt.NDArray[np.floating[Any]]
    frequency: npt.NDArray[np.floating[Any]]
    repetition: npt.NDArray[np.floating[Any]]
    prompt: RaggedIds | None = None

    def select(self, requests: npt.NDArray[np.int64]) -> Penalties:
        """Penalties of the given requests, in that order."""
        return Penalties(
            output=self.output.select(requests),
            presence=self.presence[requests],
            frequency=self.frequency[requests],
            repetition=self.repetition[requests],
            prompt=None if self.prompt is None else self.prompt.select(requests),
        )


_ARRAYS: Final = (
    "temperature", "seeds", "positions", "top_p", "top_k", "min_p", "coupled", "ignore_eos",
    "min_position", "max_new",
)  # fmt: skip


COLDEST: Final = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of R requests, one array a parameter; None switches a feature off.

    temperature:  float [R]; 0 = argmax. Between 0 and 1e-6 counts as 1e-6.
    seeds:        uint64 [R]; key of the request's randomness.
    positions:    int64 [R]; index of the token that row 0 of the request predicts.
    top_p:        float [R] in (0, 1]; 1 = off.
    top_k:        int [R]; values below 1 = off.
    min_p:        float [R] in [0, 1]; 0 = off.
    coupled:      bool [R]; verify with shared Gumbel noise: the text then depends only on
                  (prompt, parameters, seed), not on drafts, budgets or preemption.
    penalties:    see `Penalties`.
    logit_bias:   RaggedIds with values, added to the logits.
    banned:       RaggedIds, never produced.
    stop_ids:     RaggedIds, end the request when produced.
    eos_ids:      ids that end every request whose `ignore_eos` is not set.
    ignore_eos:   bool [R].
    min_position: int64 [R]; stop and eos ids cannot be produced at positions below it.
    max_new:      int64 [R]; tokens the request may still emit, at least 1.

    torch tensors are taken too and kept as numpy.
    """

    temperature: npt.NDArray[np.floating[Any]]
    seeds: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.floating[Any]] | None = None
    top_k: npt.NDArray[np.integer[Any]] | None = None
    min_p: npt.NDArray[np.floating[Any]] | None = None
    coupled: npt.NDArray[np.bool_] | None = None
    penalties: Penalties | None = None
    logit_bias: RaggedIds | None = None
    banned: RaggedIds | None = None
    stop_ids: RaggedIds | None = None
    eos_ids: tuple[int, ...] = ()
    ignore_eos: npt.NDArray[np.bool_] | None = None
    min_position: npt.NDArray[np.int64] | None = None
    max_new: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, to_host(getattr(self, name)))
        n = self.temperature.shape
        if len(n) != 1:
            raise ShapeError(f"SamplingBatch wants temperature of shape [R], got {n}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray) and value.shape != n:
                raise ShapeError(
                    f"SamplingBatch wants {field.name} of shape {n}, got {value.shape}"
                )
            if isinstance(value, RaggedIds) and value.requests != n[0]:
                raise ShapeError(
                    f"SamplingBatch wants {field.name} for {n[0]} requests, got {value.requests}"
                )
        if n[0] and not (self.temperature.min() >= 0 and np.isfinite(self.temperature.max())):
            raise ShapeError("SamplingBatch wants finite temperatures >= 0")
        if n[0] and self.top_p is not None and not self.top_p.min() >= 0:
            raise ShapeError(f"SamplingBatch wants top_p in (0, 1], got {self.top_p.min()}")
        if n[0] and self.min_p is not None and not 0 <= self.min_p.min() <= self.min_p.max() <= 1:
            raise ShapeError(
                f"SamplingBatch wants min_p in [0, 1], got {self.min_p.min()}..{self.min_p.max()}"
            )
        for name, ids, values in _lists(self):
            if ids is not None and ids.requests != n[0]:
                raise ShapeError(f"SamplingBatch wants {name} for {n[0]} requests")
            if ids is not None and values and ids.values is None:
                raise ShapeError(f"SamplingBatch wants values with the ids of {name}")

    @property
    def requests(self) -> int:
        return int(self.temperature.shape[0])

    def select(self, requests: npt.NDArray[np.int64]) -> SamplingBatch:
        """Parameters of the given requests, in that order."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                changes[field.name] = value[requests]
            elif isinstance(value, RaggedIds | Penalties):
                changes[field.name] = value.select(requests)
        return replace(self, **changes)

    def moved(
        self, positions: npt.NDArray[np.int64], max_new: npt.NDArray[np.int64] | None
    ) -> SamplingBatch:
        """The same requests some tokens later. Everything else stays, so it is not checked again;
        `penalties` would have to follow the text. Raises ShapeError for positions of more or fewer
        requests."""
        if positions.shape != self.temperature.shape:
            raise ShapeError(
                f"SamplingBatch wants positions of shape {self.temperature.shape}, got "
                f"{positions.shape}"
            )
        later = object.__new__(SamplingBatch)
        for name in _NAMES:
            object.__setattr__(later, name, getattr(self, name))
        object.__setattr__(later, "positions", positions)
        object.__setattr__(later, "max_new", max_new)
        return later

    @classmethod
    def greedy(cls, requests: int) -> SamplingBatch:
        """Argmax for every request."""
        return cls(
            temperature=np.zeros(requests),
            seeds=np.zeros(requests, dtype=np.uint64),
            positions=np.zeros(requests, dtype=np.int64),
        )

    @classmethod
    def uniform(
        cls,
        requests: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seeds: npt.NDArray[np.uint64] | None = None,
        positions: npt.NDArray[np.int64] | None = None,
    ) -> SamplingBatch:
        """The same parameters for every request; seeds default to the request's index."""
        return cls(
            temperature=np.full(requests, temperature),
            seeds=np.arange(requests, dtype=np.uint64) if seeds is None else seeds,
            positions=np.zeros(requests, dtype=np.int64) if positions is None else positions,
            top_p=None if top_p >= 1.0 else np.full(requests, top_p),
            top_k=None if top_k < 1 else np.full(requests, top_k, dtype=np.int64),
            min_p=None if min_p <= 0.0 else np.full(requests, min_p),
        )


_NAMES: Final = tuple(field.name for field in fields(SamplingBatch))


def _lists(sampling: SamplingBatch) -> list[tuple[str, RaggedIds | None, bool]]:
    """(name, ids, whether they need values) of every list of token ids."""
    p = sampling.penalties
    return [
        ("penalties.output", None if p is None else p.output, True),
        ("penalties.prompt", None if p is None else p.prompt, False),
        ("logit_bias", sampling.logit_bias, True),
        ("banned", sampling.banned, False),
        ("stop_ids", sampling.stop_ids, False),
    ]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a verify batch: row `offset` of `request` follows its first `offset` drafts.

    request, offset: int64 [B].
    """

    request: Int
    offset: Int

    @classmethod
    def of(cls, lens: Int) -> Rows:
        """1 + lens[r] rows for each request, in order."""
        counts = lens + 1
        request = np.repeat(np.arange(lens.size, dtype=np.int64), counts)
        offset = np.arange(request.size, dtype=np.int64) - (np.cumsum(counts) - counts)[request]
        return cls(request, offset)


def edit_logits(
    xp: Backend,
    logits: Any,
    rows: Rows,
    drafts: npt.NDArray[np.integer[Any]],
    sampling: SamplingBatch,
    masks: Any | None,
) -> Any:
    """Everything that changes logits before the temperature; the input is never written.

    logits: [B, V]; drafts: int [R, gamma] (row j of a request has drafts 0..j-1 before it);
    masks: bool [B, V] (True = allowed) or int32 [B, ceil(V/32)] bit words, or None.
    """
    vocab = int(logits.shape[1])
    _check_ids(sampling, vocab)
    if masks is not None:
        given: Any = masks if hasattr(masks, "dtype") else np.asarray(masks)
        words, shape = "bool" not in str(given.dtype), tuple(given.shape)
        wanted = (int(logits.shape[0]), -(-vocab // 32) if words else vocab)
        # words may be padded behind the vocabulary
        if len(shape) != 2 or shape != (wanted[0], max(wanted[1], shape[1] if words else 0)):
            raise ShapeError(f"masks wants shape {wanted}, got {shape}")
    stops = sampling.min_position is not None and (
        sampling.stop_ids is not None or bool(sampling.eos_ids)
    )
    touched = sampling.penalties, sampling.logit_bias, sampling.banned
    out = logits
    if stops or any(x is not None for x in touched):
        # edits are arithmetic too: in bfloat16 a penalty of 0.1 vanishes beside a logit of 24
        wide = xp.widen(logits)
        out = xp.copy(logits) if wide is logits else wide
    if sampling.penalties is not None:
        _penalise(xp, out, rows, drafts, sampling.penalties)
    if sampling.logit_bias is not None:
        at, entries = sampling.logit_bias.on_rows(rows.request)
        assert sampling.logit_bias.values is not None, "logit_bias needs values"
        values = sampling.logit_bias.values[entries]
        _accumulate(xp, out, at, sampling.logit_bias.ids[entries], values)
    if sampling.banned is not None:
        at, entries = sampling.banned.on_rows(rows.request)
        _ban(xp, out, at, sampling.banned.ids[entries])
    if stops:
        _ban_stops(xp, out, rows, sampling)
    return out if masks is None else xp.mask_rows(xp.widen(out), masks)


def _check_ids(sampling: SamplingBatch, vocab: int) -> None:
    """Raise ShapeError for a listed id outside 0..vocab-1 (stop ids may be anything unless
    they are kept back by `min_position`)."""
    for name, ids, _ in _lists(sampling):
        if name == "stop_ids" and sampling.min_position is None:
            continue
        if ids is not None and ids.ids.size and (ids.ids.min() < 0 or ids.ids.max() >= vocab):
            raise ShapeError(
                f"SamplingBatch wants {name} in 0..{vocab - 1}, got {ids.ids.min()}.."
                f"{ids.ids.max()}"
            )
    if sampling.min_position is not None and any(not 0 <= e < vocab for e in sampling.eos_ids):
        raise ShapeError(f"SamplingBatch wants eos_ids in 0..{vocab - 1}, got {sampling.eos_ids}")


def _ban(xp: Backend, out: Any, rows: Int, ids: Int) -> None:
    xp.set_at(out, rows, ids, np.full(rows.size, -np.inf))


def _ban_stops(xp: Backend, out: Any, rows: Rows, sampling: SamplingBatch) -> None:
    assert sampling.min_position is not None
    position = sampling.positions[rows.request] + rows.offset
    early = np.flatnonzero(position < sampling.min_position[rows.request])
    for eos in sampling.eos_ids:
        _ban(xp, out, early, np.full(early.size, eos, dtype=np.int64))
    if sampling.stop_ids is not None:
        at, entries = sampling.stop_ids.on_rows(rows.request[early])
        _ban(xp, out, early[at], sampling.stop_ids.ids[entries])


def _accumulate(xp: Backend, out: Any, rows: Int, ids: Int, values: Float) -> None:
    """Add with repeated (row, id) pairs summed first: scattered adds keep only one of them."""
    stride = np.int64(ids.max(initial=0) + 1)
    keys, inverse = np.unique(rows * stride + ids, return_inverse=True)
    total = np.bincount(inverse, weights=values, minlength=keys.size).astype(np.float64)
    xp.add_at(out, keys // stride, keys % stride, total)


def _penalise(
    xp: Backend,
    out: Any,
    rows: Rows,
    drafts: npt.NDArray[np.integer[Any]],
    penalties: Penalties,
) -> None:
    at, entries = penalties.output.on_rows(rows.request)
    counts = penalties.output.values
    assert counts is not None, "Penalties.output needs counts as values"
    # row j also counts drafts 0..j-1 of its own request: they precede it if the row is used at all
    before = np.arange(drafts.shape[1])[None, :] < rows.offset[:, None]
    draft_row, draft_at = np.nonzero(before)
    draft_ids = drafts[rows.request[draft_row], draft_at].astype(np.int64)
    all_rows = np.concatenate([at, draft_row])
    all_ids = np.concatenate([penalties.output.ids[entries], draft_ids])
    weights = np.concatenate([counts[entries], np.ones(draft_row.size)])
    stride = np.int64(all_ids.max(initial=0) + 1)
    keys, inverse = np.unique(all_rows * stride + all_ids, return_inverse=True)
    total = np.bincount(inverse, weights=weights, minlength=keys.size)
    seen_rows, seen_ids = keys // stride, keys % stride

    if np.any(penalties.repetition != 1.0):
        rep_rows, rep_ids = seen_rows, seen_ids
        if penalties.prompt is not None:
            p_at, p_entries = penalties.prompt.on_rows(rows.request)
            stride = max(stride, np.int64(penalties.prompt.ids.max(initial=0) + 1))
            both = np.unique(
                np.concatenate(
                    [
                        seen_rows * stride + seen_ids,
                        p_at * stride + penalties.prompt.ids[p_entries],
                    ]
                )
            )
            rep_rows, rep_ids = both // stride, both % stride
        value = xp.gather(out, rep_rows, rep_ids)
        factor = penalties.repetition[rows.request[rep_rows]]
        xp.set_at(out, rep_rows, rep_ids, np.where(value > 0, value / factor, value * factor))
    request = rows.request[seen_rows]
    cost = penalties.presence[request] * (total > 0) + penalties.frequency[request] * total
    xp.add_at(out, seen_rows, seen_ids, -cost)


def scale_and_truncate(xp: Backend, logits: Any, sampling: SamplingBatch, request: Int) -> Any:
    """Temperature, top-p, top-k, min-p. logits: [n, V]; row i is of request[i], not greedy.

    Returns logits in float32 or float64, whatever came in, with each row's largest entry at 0.
    """
    temperature = np.maximum(sampling.temperature[request].astype(np.float64), COLDEST)
    out = xp.scale_rows(xp.widen(logits), temperature)
    if sampling.top_p is None and sampling.top_k is None and sampling.min_p is None:
        return out
    n, vocab = request.size, out.shape[1]
    top_p = np.ones(n) if sampling.top_p is None else sampling.top_p[request].astype(np.float64)
    top_k = np.full(n, vocab, dtype=np.int64)
    if sampling.top_k is not None:
        asked = sampling.top_k[request].astype(np.int64)
        top_k = np.where(asked < 1, vocab, asked)
    min_p = np.zeros(n) if sampling.min_p is None else sampling.min_p[request].astype(np.float64)
    cut = np.flatnonzero((top_p < 1.0) | (top_k < vocab) | (min_p > 0.0))
    if cut.size == n:
        return xp.truncate(out, top_p, top_k, min_p)
    if cut.size:
        out[cut] = xp.truncate(xp.take(out, cut), top_p[cut], top_k[cut], min_p[cut])
    return out
