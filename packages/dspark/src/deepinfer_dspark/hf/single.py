"""A transformers model as target of one sequence: no padding, and no mask where none is needed."""

from __future__ import annotations

import inspect
from typing import Any

from deepinfer_dspark.hf.cache import Masks, RaggedCache
from deepinfer_dspark.torch_extra import Tensor, torch


class SingleTarget:
    """Passes of one sequence at its own positions; a later pass overwrites what was not kept."""

    def __init__(self, model: Any) -> None:
        self._model, self._masks = model, Masks(model)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in known
        self._cache = RaggedCache()

    def prefill(self, text: list[int]) -> Tensor:
        """Logits [1, V] after the whole text, which starts the sequence."""
        self._cache = RaggedCache()
        options: dict[str, Any] = {"logits_to_keep": 1} if self._can_skip_logits else {}
        # an empty cache and no mask: the model itself attends causally, in its fastest way
        return self._pass(text, 0, None, options)[-1:]

    def forward(self, tokens: list[int], start: int) -> Tensor:
        """Logits [n, V] after each of the tokens, which stand at positions start.. ."""
        mask = None
        if len(tokens) > 1 or self._masks.windowed:
            at = torch.arange(start, start + len(tokens))[None]
            mask = self._masks.of(at, start + len(tokens))
        return self._pass(tokens, start, mask, {})

    def _pass(self, tokens: list[int], start: int, mask: Any, options: dict[str, Any]) -> Tensor:
        width = len(tokens)
        self._cache.begin(None, torch.tensor([start]), width, 1)
        out = self._model(
            input_ids=torch.tensor([tokens]),
            attention_mask=mask,
            position_ids=torch.arange(start, start + width)[None],
            use_cache=True,
            **{self._cache_name: self._cache},
            **options,
        )
        return out.logits[0]
