"""One ragged forward pass of a transformers model, as target and as draft model.

All requests go through the model in one forward pass, each at its own position: see `cache`.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.errors import ShapeError
from deepinfer_dspark.hf.cache import Masks, RaggedCache
from deepinfer_dspark.loop import TargetOutput
from deepinfer_dspark.torch_extra import Tensor, torch

Int = npt.NDArray[np.int64]
SHORT_PASS = 16
"""Widest pass that computes logits of every row; longer ones only fill the cache first."""


class _Runner:
    """One ragged forward pass of a causal language model."""

    def __init__(self, model: Any, layers: Sequence[int] = ()) -> None:
        self._model, self._layers = model.eval(), tuple(layers)
        self._masks = Masks(model)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.max_length: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        known = inspect.signature(model.forward).parameters
        # the name of the cache changed within major version 5
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in known

    @torch.no_grad()
    def run(
        self,
        texts: Sequence[Any],
        starts: Int,
        cache: RaggedCache,
        slots: int,
        rows: Int | None = None,
        *,
        fill_only: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Feed texts[i] (int arrays) at positions starts[i] on.

        Returns logits [sum of lengths, V] (None if fill_only) and features [same, m*d] or None.
        """
        lengths = np.array([len(t) for t in texts])
        width = int(lengths.max())
        ids = torch.zeros(len(texts), width, dtype=torch.int64)
        inside = torch.arange(width)[None, :] < torch.from_numpy(lengths)[:, None]
        ids[inside] = torch.from_numpy(np.concatenate(texts).astype(np.int64))
        first = torch.from_numpy(np.asarray(starts, dtype=np.int64))
        # padding writes behind the text, where the next pass overwrites it before anything may look
        at = first[:, None] + torch.arange(width)[None, :]
        cache.begin(None if rows is None else torch.from_numpy(rows), first, width, slots)
        options: dict[str, Any] = {self._cache_name: cache}
        if fill_only and self._can_skip_logits:
            options["logits_to_keep"] = 1
        out = self._model(
            input_ids=ids,
            attention_mask=self._masks.of(at, int(at.max()) + 1),
            # padding may stand beyond the last position a model knows
            position_ids=torch.where(inside, at, first[:, None]),
            use_cache=True,
            output_hidden_states=bool(self._layers),
            **options,
        )
        features = None
        if self._layers:
            features = torch.cat([out.hidden_states[i][inside] for i in self._layers], dim=-1)
        return None if fill_only else out.logits[inside], features


@dataclass(slots=True)
class HFState:
    """cache: entries of R requests; length: int64 [R], committed ones; rows: int64 [R], entries
    written by the last pass."""

    cache: RaggedCache
    length: Int
    rows: Int


class HFTarget:
    """`Target` over a causal language model of transformers on the CPU, full or sliding-window
    attention, implementation "sdpa" or "eager".

    feature_layers: indices into `hidden_states` (0 = embeddings) handed to the drafter; never the
    last one, which is already normalised.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        self._runner = _Runner(model, feature_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self._runner.vocab_size

    @property
    def max_length(self) -> int | None:
        """Positions the model was made for."""
        return self._runner.max_length

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[HFState, Tensor | None]:
        """Prefill each prompt but its last token."""
        length = np.array([len(p) - 1 for p in prompts], dtype=np.int64)
        state = HFState(RaggedCache(), length, np.zeros_like(length))
        if not length.any():
            return state, None
        texts = [np.asarray(p[:-1], dtype=np.int64) for p in prompts]
        _, features = self._runner.run(
            texts, np.zeros_like(length), state.cache, len(prompts), fill_only=True
        )
        return state, features

    def forward(self, tokens: Int, cu_lens: Int, positions: Int, state: HFState) -> TargetOutput:
        """One pass over all requests. Raises ShapeError if a request does not continue where its
        committed entries end."""
        begin = positions[cu_lens[:-1]]
        if not np.array_equal(begin, state.length):
            raise ShapeError(
                f"forward wants requests to start at {state.length.tolist()}, got {begin.tolist()}"
            )
        texts = np.split(tokens, cu_lens[1:-1])
        logits, features = self._runner.run(texts, state.length, state.cache, len(texts))
        state.rows = np.diff(cu_lens)
        return TargetOutput(logits, features)

    def commit(self, state: HFState, keep: Int) -> None:
        """Entries behind the kept ones are forgotten: the next pass overwrites them."""
        if keep.shape != state.rows.shape or (keep > state.rows).any() or (keep < 0).any():
            raise ShapeError(f"commit wants 0..{state.rows.tolist()} rows, got {keep.tolist()}")
        state.length = state.length + keep
        state.rows = np.zeros_like(state.rows)

    def select(self, state: HFState, requests: Int) -> HFState:
        """State of the given requests."""
        state.cache.take(torch.from_numpy(requests))
        return HFState(state.cache, state.length[requests], state.rows[requests])


class HFCausal:
    """`CausalModel` over transformers: a small draft model, one cache for all requests."""

    def __init__(self, model: Any) -> None:
        self._runner = _Runner(model)
        self._cache = RaggedCache()
        self._slot: dict[Hashable, int] = {}
        self._held: list[list[int]] = []
        self._free: list[int] = []

    @property
    def max_length(self) -> int | None:
        """Positions the model was made for."""
        return self._runner.max_length

    def logits(self, request_ids: Sequence[Hashable], texts: Sequence[Sequence[int]]) -> Tensor:
        """float [R, V]; only what the cache does not hold yet is computed."""
        slots = np.array([self._slot_of(r) for r in request_ids], dtype=np.int64)
        # the last token must run to give its logits
        starts = np.array(
            [
                min(_common_prefix(self._held[s], t), len(t) - 1)
                for s, t in zip(slots.tolist(), texts, strict=True)
            ],
            dtype=np.int64,
        )
        new = [
            np.asarray(t[s:], dtype=np.int64) for t, s in zip(texts, starts.tolist(), strict=True)
        ]
        count = len(self._held)
        rows = None if np.array_equal(slots, np.arange(count)) else slots
        if max(x.size for x in new) > SHORT_PASS:
            self._runner.run(
                [x[:-1] for x in new], starts, self._cache, count, rows, fill_only=True
            )
            starts = starts + [x.size - 1 for x in new]
            new = [x[-1:] for x in new]
        logits, _ = self._runner.run(new, starts, self._cache, count, rows)
        assert logits is not None
        for s, text in zip(slots.tolist(), texts, strict=True):
            self._held[s] = list(text)
        return logits[np.cumsum([x.size for x in new]) - 1]

    def _slot_of(self, request: Hashable) -> int:
        if request not in self._slot:
            if not self._free:
                self._free.append(len(self._held))
                self._held.append([])
            self._slot[request] = self._free.pop()
        return self._slot[request]

    def forget(self, request_id: Hashable) -> None:
        """Give the cache of a request to the next one."""
        slot = self._slot.pop(request_id, None)
        if slot is not None:
            self._held[slot] = []
            self._free.append(slot)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if n and list(a[:n]) == list(b[:n]):
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)
