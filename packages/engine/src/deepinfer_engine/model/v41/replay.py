"""Bounded replay: prompt tokens far from the end skip the consumer layers.

Layers from the first ratio-1 layer on ("consumers") own no cache of a prompt's early tokens except
the compressed entries of their first layer, which depend on the producers alone. So only the last
`keep` tokens of a prompt must run through the consumers; everything persistent stays exact, and
what the kept tokens see of each other's windows is cut at `len(prompt) - keep`.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.family import ReplayMode
from deepinfer_engine.model.v41.config import TextConfig


@dataclass(frozen=True, slots=True)
class Replay:
    """A mode and the number of prompt tokens that run through all layers."""

    mode: ReplayMode = "off"
    keep: int = 0

    @staticmethod
    def of(config: TextConfig, mode: str, keep: int | None = None) -> Replay:
        """Checked for a model; `keep` defaults to the least that is legal.

        Raises ConfigError: an unknown mode, a `keep` below window + backtracking rows (decoding
        would read rows that were dropped), or a model whose layers cannot be split.
        """
        if mode == "off":
            return OFF
        if mode not in ("mask", "compact"):
            raise ConfigError(f"replay must be 'off', 'mask' or 'compact', got {mode!r}")
        least = config.ring_slots
        keep = least if keep is None else keep
        if keep < least:
            raise ConfigError(
                f"keep must be at least {least} for this model (window {config.sliding_window} + "
                f"{config.backtrack}), got {keep}"
            )
        first = config.n_producers
        if first == config.num_hidden_layers:
            raise ConfigError("replay: this model has no ratio-1 layers that could be skipped")
        late_sources = [s for s in config.kv_source_layer_ids if s > first]
        late_engrams = [e for e in config.engram_layer_ids if e >= first]
        targets = config.dspark_target_layer_ids if config.num_nextn_predict_layers else ()
        if late_sources or late_engrams or len({t >= first for t in targets}) > 1:
            raise ConfigError(
                f"replay needs all KV sources up to layer {first}, n-gram layers before it, and "
                "draft targets on one side of it; this model has "
                f"{late_sources or late_engrams or list(targets)}"
            )
        return Replay(mode, keep)

    def start(self, prompt_len: int) -> int:
        """First position of a prompt of this length that consumer windows may hold."""
        return 0 if self.mode == "off" else max(0, prompt_len - self.keep)


OFF = Replay()
