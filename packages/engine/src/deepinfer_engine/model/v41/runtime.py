"""A V4.1 checkpoint behind the interface of every family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.adapters.dspark import CounterRng, Proposal, SamplingBatch, sample_drafts
from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.core.runner import (
    BLOCK_TOKENS,
    CacheLayout,
    DecodeRow,
    IntArray,
    PrefillChunk,
)
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.family import LoadOptions
from deepinfer_engine.model.options import blocks_of
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.assembly import DTYPES, Parts, assemble
from deepinfer_engine.model.v41.backbone import Backbone
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import ModelConfig, load_config
from deepinfer_engine.model.v41.draft import Drafter
from deepinfer_engine.model.v41.weights import load_vision, tensors_of
from deepinfer_engine.model.vision.image_rows import Images
from deepinfer_engine.model.vision.tower import VisionTower


def load(
    model_dir: Path, options: LoadOptions, *, num_blocks: int | None, num_slots: int
) -> V41Model:
    """See `Family.load`."""
    keep = options.keep
    if options.replay != "off" and keep is None:
        keep = load_config(model_dir).text_config.ring_slots + BLOCK_TOKENS
    parts = assemble(
        model_dir,
        dtype=options.dtype,
        cache_quant=options.cache_quant,
        vision=options.vision,
        tower=options.tower,
        replay=options.replay,
        keep=keep,
        device=options.device,
        seat=options.seat,
        batch_invariant=options.batch_invariant,
    )
    return V41Model(parts, num_blocks=num_blocks, num_slots=num_slots)


def load_tower(model_dir: Path, options: LoadOptions) -> VisionTower:
    """See `DeepseekV41.load_tower`."""
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    config = load_config(model_dir)
    rules = config.picture_rules
    if config.vision_config is None or rules is None:
        raise ConfigError(f"the model in {model_dir} has no vision tower: it takes no pictures")
    weights = load_vision(model_dir, config, DTYPES[options.dtype])
    ops = Operators(options.device.kind, batch_invariant=options.batch_invariant)
    return VisionTower(
        config.vision_config, weights, ops, rules, batch_invariant=options.batch_invariant
    )


class V41Model:
    """Implements `LoadedModel`."""

    def __init__(self, parts: Parts, *, num_blocks: int | None, num_slots: int) -> None:
        self._parts = parts
        self._text = parts.config.text_config
        self._pools = parts.pools(blocks_of(num_blocks, parts.layout.block_bytes), num_slots)
        self._backbone = Backbone(
            self._text, parts.weights, self._pools, parts.engram, parts.replay, parts.seat
        )
        self._tower = VisionTower.of(parts.config, parts.weights, parts.ops)
        self._drafts = BlockDrafts(self._backbone) if parts.weights.draft is not None else None

    @property
    def config(self) -> ModelConfig:
        return self._parts.config

    @property
    def layout(self) -> CacheLayout:
        return self._pools.layout

    @property
    def lookback(self) -> int:
        return self._text.lookback

    @property
    def window(self) -> int:
        return self._text.sliding_window

    @property
    def window_rows(self) -> int:
        return self._text.ring_slots

    @property
    def window_layers(self) -> int:
        replay = self._parts.replay
        return self._text.num_hidden_layers if replay.mode == "off" else self._text.n_producers

    @property
    def replay_keep(self) -> int:
        return self._parts.replay.keep

    @property
    def blocks(self) -> Tensor:
        return self._pools.blocks

    @property
    def states(self) -> Tensor:
        return self._pools.states

    @property
    def drafts(self) -> BlockDrafts | None:
        return self._drafts

    def rows_of(self, chunk: PrefillChunk) -> SequenceRows:
        return SequenceRows(
            chunk.token_ids,
            chunk.start,
            chunk.lookback,
            chunk.block_table,
            chunk.state_slot,
            chunk.snapshots,
            images=self._images(chunk),
            replay_from=self._backbone.replay.start(chunk.prompt_len),
            valid_start=chunk.valid_start,
            entries_from=chunk.entries_from,
        )

    def forward(self, rows: Sequence[SequenceRows], logit_rows: Tensor | None) -> Tensor:
        if not rows:  # of a group whose other members have some
            return self._backbone.without_rows()
        return self._backbone.forward(Batch(self._text, rows), logit_rows)

    def dense_weights(self) -> list[Tensor]:
        weights = replace(self._parts.weights, vision=None)
        return [t for t in tensors_of(weights) if t is not weights.embed]

    def _images(self, chunk: PrefillChunk) -> Images:
        """(offset in the chunk, embeddings) of what lies in it of each picture."""
        if not chunk.pictures:
            return ()
        end = chunk.start + len(chunk.token_ids)
        parts: list[tuple[int, Tensor]] = []
        for picture in chunk.pictures:
            low, high = max(picture.start, chunk.start), min(picture.end, end)
            span = self._span(picture)
            parts.append((low - chunk.start, span[low - picture.start : high - picture.start]))
        return tuple(parts)

    def _span(self, picture: Picture) -> Tensor:
        if picture.rows is not None:
            given = torch.frombuffer(picture.rows, dtype=self._parts.dtype)
            return given.view(picture.length, self._text.hidden_size)
        assert self._tower is not None, "pictures for a model without a tower"
        return self._tower.span(picture)


class BlockDrafts:
    """The DSpark draft module as a source of drafts."""

    def __init__(self, backbone: Backbone) -> None:
        self._drafter = Drafter(backbone)
        self.most = backbone.config.dspark_block_size

    def propose(
        self,
        rows: Sequence[DecodeRow],
        lens: IntArray,
        length: int,
        sampling: SamplingBatch,
        rng: CounterRng,
    ) -> Proposal:
        # Noise is keyed by the anchor's position: it advances every round, so no key is used twice.
        rounds = sampling.positions
        drawn_from: list[Tensor] = []

        def pick(offset: int, logits: Tensor) -> Tensor:
            tokens, distribution = sample_drafts(logits, sampling, rounds, offset, rng)
            drawn_from.append(distribution)
            return torch.from_numpy(np.asarray(tokens, dtype=np.int64))

        block = self._drafter.run(
            torch.tensor([r.history[-1] for r in rows]),
            torch.tensor([len(r.history) - 1 for r in rows]),
            torch.tensor([r.state_slot for r in rows]),
            length,
            pick,
        )
        drawn = sampling.temperature > 0
        if sampling.coupled is not None:
            drawn = drawn & ~sampling.coupled
        return Proposal(
            tokens=block.tokens.numpy(),
            lengths=lens,
            q=torch.stack(drawn_from, dim=1) if drawn.any() else None,
            conf=block.confidence.to(torch.float32).numpy(),
        )
