"""A transformers model as target of token trees: one sequence, a mask that follows the tree."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer_dspark.errors import UnsupportedModelError
from deepinfer_dspark.hf.cache import Masks, RaggedCache
from deepinfer_dspark.loop import TargetOutput
from deepinfer_dspark.torch_extra import Tensor, torch

Int = npt.NDArray[np.int64]


@dataclass(slots=True)
class _State:
    cache: RaggedCache
    length: int


class HFTreeTarget:
    """`TreeTarget` over a causal language model of transformers on the CPU, full attention,
    implementation "sdpa" or "eager".

    feature_layers: indices into `hidden_states` (0 = embeddings) handed to the drafter.
    """

    def __init__(self, model: Any, feature_layers: Sequence[int] = ()) -> None:
        self._model, self._layers = model.eval(), tuple(feature_layers)
        if Masks(model).windowed:
            raise UnsupportedModelError(
                "trees want full attention: this model has sliding-window layers, draft chains"
            )
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.max_length: int | None = getattr(
            model.config.get_text_config(), "max_position_embeddings", None
        )
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"

    def start(self, prompt: Sequence[int]) -> tuple[_State, Tensor | None]:
        """See `TreeTarget.start`."""
        state, n = _State(RaggedCache(), 0), len(prompt) - 1
        if n == 0:
            return state, None
        at = np.arange(n)
        out = self.forward(np.array(prompt[:-1]), at, at[None, :] <= at[:, None], state)
        state.length = n
        return state, out.features

    @torch.no_grad()
    def forward(
        self, tokens: Int, positions: Int, visible: npt.NDArray[np.bool_], state: _State
    ) -> TargetOutput:
        """See `TreeTarget.forward`."""
        width = len(tokens)
        state.cache.begin(None, torch.tensor([state.length]), width, 1)
        seen = torch.ones(width, state.length + width, dtype=torch.bool)
        seen[:, state.length :] = torch.from_numpy(visible)
        dtype = self._model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        out = self._model(
            input_ids=torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None],
            attention_mask=mask[None, None],
            position_ids=torch.from_numpy(np.asarray(positions, dtype=np.int64))[None],
            use_cache=True,
            output_hidden_states=bool(self._layers),
            **{self._cache_name: state.cache},
        )
        features = None
        if self._layers:
            features = torch.cat([out.hidden_states[i][0] for i in self._layers], dim=-1)
        return TargetOutput(out.logits[0], features)

    def keep(self, state: _State, rows: Int) -> None:
        """See `TreeTarget.keep`."""
        state.cache.keep(state.length, torch.from_numpy(np.asarray(rows, dtype=np.int64)))
        state.length += len(rows)
