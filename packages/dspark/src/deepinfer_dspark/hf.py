"""transformers models as target and as draft model (needs the `hf` extra).

Every request has a cache of its own, cut back with `DynamicCache.crop` after each round: simple
and exact, one forward a request. Batching belongs to an engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer_dspark.loop import TargetOutput

Int = npt.NDArray[np.int64]


class HFTarget:
    """`Target` over a causal language model of transformers.

    feature_layers: indices into `hidden_states` (0 = embeddings) handed to the drafter; never the
    last one, which is already normalised.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        self._model = model.eval()
        self._layers = tuple(feature_layers)
        self._rows: Int = np.zeros(0, dtype=np.int64)

    def start(self, prompts: Sequence[Sequence[int]]) -> tuple[list[Any], Tensor | None]:
        """Prefill each prompt but its last token."""
        state: list[Any] = []
        features: list[Tensor] = []
        for prompt in prompts:
            cache = _new_cache()
            if len(prompt) > 1:
                out = self._run(torch.tensor([list(prompt[:-1])]), cache)
                features += self._features(out)
            state.append(cache)
        return state, torch.cat(features) if features else None

    def forward(self, tokens: Int, cu_lens: Int, positions: Int, state: list[Any]) -> TargetOutput:
        """One forward a request; positions follow from the caches."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        for r, cache in enumerate(state):
            ids = torch.from_numpy(tokens[cu_lens[r] : cu_lens[r + 1]])[None]
            out = self._run(ids, cache)
            logits.append(out.logits[0])
            features += self._features(out)
        self._rows = np.diff(cu_lens)
        return TargetOutput(torch.cat(logits), torch.cat(features) if features else None)

    def commit(self, state: list[Any], keep: Int) -> None:
        """Cut each cache back to its kept rows."""
        for cache, rows, kept in zip(state, self._rows.tolist(), keep.tolist(), strict=True):
            if kept < rows:
                cache.crop(kept - rows)  # negative: that many entries fewer

    def select(self, state: list[Any], requests: Int) -> list[Any]:
        """Caches of the given requests."""
        return [state[r] for r in requests.tolist()]

    @torch.no_grad()
    def _run(self, ids: Tensor, cache: Any) -> Any:
        return self._model(
            input_ids=ids.to(self._model.device),
            use_cache=True,
            output_hidden_states=bool(self._layers),
            **{_cache_argument(self._model): cache},
        )

    def _features(self, out: Any) -> list[Tensor]:
        if not self._layers:
            return []
        return [torch.cat([out.hidden_states[i][0] for i in self._layers], dim=-1)]


class HFCausal:
    """`CausalModel` over transformers: a small draft model with one cache a request."""

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        self._caches: dict[Hashable, tuple[list[int], Any]] = {}

    @torch.no_grad()
    def logits(self, request_ids: Sequence[Hashable], texts: Sequence[Sequence[int]]) -> Tensor:
        """float [R, V]; only what the cache does not hold yet is computed."""
        rows: list[Tensor] = []
        for request, text in zip(request_ids, texts, strict=True):
            held, cache = self._caches.get(request, ([], None))
            same = _common_prefix(held, text)
            same = min(same, len(text) - 1)  # the last token must run to give its logits
            if cache is None:
                cache = _new_cache()
            elif same < len(held):
                cache.crop(same - len(held))
            ids = torch.tensor([list(text[same:])], device=self._model.device)
            out = self._model(
                input_ids=ids, use_cache=True, **{_cache_argument(self._model): cache}
            )
            rows.append(out.logits[0, -1])
            self._caches[request] = (list(text), cache)
        return torch.stack(rows)

    def forget(self, request_id: Hashable) -> None:
        """Drop the cache of a request."""
        self._caches.pop(request_id, None)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    if n and list(a[:n]) == list(b[:n]):
        return n
    return next((i for i in range(n) if a[i] != b[i]), n)


def _cache_argument(model: Any) -> str:
    """The name transformers gives the cache: it was renamed within major version 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _new_cache() -> Any:
    import transformers  # pyright: ignore[reportMissingImports]

    # made without the config: a config-aware cache lets sliding layers forget entries that a
    # rejected row would need back
    return transformers.DynamicCache()
