"""A key-value cache of transformers for ragged batches that can take tokens back.

One buffer a layer, [slots, heads, capacity, d]; a forward pass writes each row at that row's own
next position. Entries behind a row's length are never visible and are overwritten before they are,
so forgetting rejected tokens costs nothing: only a length changes.
"""

from __future__ import annotations

from typing import Any, cast

from deepinfer_dspark.errors import UnsupportedModelError
from deepinfer_dspark.torch_extra import Tensor, torch

try:
    import transformers  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as e:
    if e.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "deepinfer_dspark.hf needs transformers: pip install './packages/dspark[hf]'",
        name="transformers",
    ) from None

_GRAIN = 256
_Base = cast("type[Any]", transformers.DynamicCache)


class RaggedCache(_Base):
    """Buffers of every layer. Call `begin` before each forward pass of the model."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._rows: Tensor | None = None
        self._at = torch.zeros(0, 0, dtype=torch.int64)
        self._slots = self._top = self._capacity = 0

    def begin(self, rows: Tensor | None, starts: Tensor, width: int, slots: int) -> None:
        """The next pass writes `width` entries for each row, from starts[i] on.

        rows: int64 [R], slot of each row, or None where they are 0..R-1 of R slots;
        starts: int64 [R]; slots: how many there are in all.
        """
        self._rows, self._slots = rows, slots
        self._at = starts[:, None] + torch.arange(width)
        self._top = int(self._at.max()) + 1
        if self._top > self._capacity:  # doubled, so that growing costs O(1) an entry
            self._capacity = max(-(-self._top // _GRAIN) * _GRAIN, 2 * self._capacity)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """What an attention layer calls: [R, heads, width, d] in, [R, heads, top, d] out."""
        if layer_idx == len(self._keys):
            self._keys.append(self._room(key_states))
            self._values.append(self._room(value_states))
        return (
            self._write(self._keys, layer_idx, key_states),
            self._write(self._values, layer_idx, value_states),
        )

    def _write(self, buffers: list[Tensor], layer: int, states: Tensor) -> Tensor:
        held = buffers[layer]
        if held.shape[0] < self._slots or held.shape[2] < self._top:
            buffers[layer] = self._room(states)
            buffers[layer][: held.shape[0], :, : held.shape[2]] = held
            held = buffers[layer]
        if self._rows is not None:
            held[self._rows[:, None], :, self._at] = states.transpose(1, 2)
            return held[self._rows, :, : self._top]
        if self._slots == 1:  # a slice is cheaper than an index
            held[:, :, self._top - states.shape[2] : self._top] = states
        else:
            held[torch.arange(self._slots)[:, None], :, self._at] = states.transpose(1, 2)
        return held[: self._slots, :, : self._top]

    def _room(self, like: Tensor) -> Tensor:
        return like.new_zeros(self._slots, like.shape[1], self._capacity, like.shape[3])

    def take(self, rows: Tensor) -> None:
        """Keep the given slots, in that order."""
        self._keys = [k[rows] for k in self._keys]
        self._values = [v[rows] for v in self._values]

    def keep(self, start: int, rows: Tensor) -> None:
        """Of the entries from `start` on these stay, in this order, in every slot."""
        for buffers in (self._keys, self._values):
            for held in buffers:
                held[:, :, start : start + rows.numel()] = held[:, :, start + rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Entries before the pass that `begin` announced, of the longest row."""
        return self._top - self._at.shape[1]


class Masks:
    """Attention masks of a ragged pass, for full and sliding-window layers."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None)
        if getattr(config, "layer_types", None) is None and window is not None:
            kinds = {"sliding_attention"}
        implementation = getattr(config, "_attn_implementation", None)
        if kinds - {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(
                f"layers of kind {', '.join(sorted(kinds))} cannot take tokens back: want "
                "full_attention and sliding_attention only"
            )
        if implementation not in ("sdpa", "eager"):
            raise UnsupportedModelError(
                f"ragged batches need explicit masks: load the model with attn_implementation "
                f"'sdpa' or 'eager', got {implementation!r}"
            )
        if model.device.type != "cpu":
            raise UnsupportedModelError(
                f"this adapter was written for and tested on the CPU: got a model on {model.device}"
            )
        self._kinds, self._window, self._dtype = kinds, int(window or 0), model.dtype
        self.windowed = "sliding_attention" in kinds

    def of(self, at: Tensor, top: int) -> Any:
        """Additive [R, 1, width, top], or one for each kind of layer. at: positions [R, width]."""
        column = torch.arange(top)
        seen = column <= at[:, :, None]
        masks = {"full_attention": seen}
        if self.windowed:
            masks["sliding_attention"] = seen & (column > at[:, :, None] - self._window)
        lowest = torch.finfo(self._dtype).min
        made = {
            kind: torch.zeros(m.shape, dtype=self._dtype).masked_fill_(~m, lowest)[:, None]
            for kind, m in masks.items()
            if kind in self._kinds
        }
        return made if len(made) > 1 else next(iter(made.values()))
