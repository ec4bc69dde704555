"""A checkpoint directory opened: configuration, weights, n-gram hashing, cache layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.core.runner import CacheLayout
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.family import CacheQuant, ExpertSeat
from deepinfer_engine.model.files import load_tokenizer, model_fingerprint
from deepinfer_engine.model.v41.config import ModelConfig, load_config
from deepinfer_engine.model.v41.engram import Engram
from deepinfer_engine.model.v41.layout import build_layout
from deepinfer_engine.model.v41.pools import Pools
from deepinfer_engine.model.v41.replay import Replay
from deepinfer_engine.model.v41.weights import ModelWeights, load_weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runtime is put together from."""

    config: ModelConfig
    weights: ModelWeights
    engram: Engram | None
    layout: CacheLayout
    dtype: torch.dtype
    cache_quant: CacheQuant
    replay: Replay
    ops: Operators
    seat: ExpertSeat | None = None

    def pools(self, num_blocks: int, num_slots: int) -> Pools:
        """Cache memory for this model."""
        return Pools(
            self.config.text_config,
            self.layout,
            self.ops,
            num_blocks=num_blocks,
            num_slots=num_slots,
            dtype=self.dtype,
            cache_quant=self.cache_quant,
            memory=None if self.seat is None else self.seat.memory,
        )


def assemble(
    model_dir: Path,
    *,
    dtype: str,
    cache_quant: CacheQuant,
    vision: bool = True,
    tower: bool = True,
    replay: str = "off",
    keep: int | None = None,
    device: Device = CPU,
    seat: ExpertSeat | None = None,
    batch_invariant: bool = False,
) -> Parts:
    """Check and read a checkpoint directory; `vision`: with its tower, where it has one, or where
    `tower` is False with what takes embeddings that another process has computed.

    replay, keep: as `Replay.of`; states written under bounded replay get a layout of their own,
        so that nobody takes them for exact ones.
    seat: this process holds a share of the routed experts.
    batch_invariant: see `LoadOptions`.

    Raises ConfigError for an unusable argument, CheckpointError for an unusable directory.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if cache_quant not in ("reference", "none"):
        raise ConfigError(f"cache_quant must be 'reference' or 'none', got {cache_quant!r}")
    config = load_config(model_dir)
    ops = Operators(device.kind, batch_invariant=batch_invariant)
    text = config.text_config
    bounds = Replay.of(text, replay, keep)
    fingerprint = model_fingerprint(model_dir, batch_invariant=batch_invariant)
    if bounds.mode != "off":
        fingerprint += f" replay {bounds.keep}"
    held = None if seat is None else seat.place(text.num_hidden_layers, text.n_routed_experts)
    weights = load_weights(model_dir, config, DTYPES[dtype], vision=vision, tower=tower, held=held)
    if seat is not None:
        seat.hold([[w.moe.w1, w.moe.w3, w.moe.w2] for w in weights.layers])
    return Parts(
        config=config,
        engram=Engram(text, load_tokenizer(model_dir), ops) if text.engram_layer_ids else None,
        weights=weights,
        layout=build_layout(
            text, dtype=DTYPES[dtype], cache_quant=cache_quant, fingerprint=fingerprint
        ),
        dtype=DTYPES[dtype],
        cache_quant=cache_quant,
        replay=bounds,
        ops=ops,
        seat=seat,
    )
