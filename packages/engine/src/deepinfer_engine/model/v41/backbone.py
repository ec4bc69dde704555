"""The V4.1 backbone: one forward pass of a batch through all layers, caches included.

Between sub-layers travel the residual streams `S [n, h, H]` and the pending mix `p [n, h]`: the mix
a sub-layer computes is applied by the *next* one (shifted hyper-connections), and the last one by
the final collapse. What a sub-layer gave is added to the streams in the same call that reads them
for the next one, so it travels as well (`Output`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.model.family import ExpertSeat
from deepinfer_engine.model.v41.attention import (
    Angles,
    Compressor,
    Indexer,
    Reader,
    Shared,
    query_key,
)
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.engram import Engram
from deepinfer_engine.model.v41.moe import moe, moe_in_group
from deepinfer_engine.model.v41.pools import Pools
from deepinfer_engine.model.v41.replay import OFF, Replay
from deepinfer_engine.model.v41.rope import Rope
from deepinfer_engine.model.v41.weights import (
    LayerWeights,
    MixWeights,
    ModelWeights,
    accumulation_dtype,
)


@dataclass(frozen=True, slots=True)
class PassAngles:
    """Rotations of one forward pass, per frequency set."""

    plain: Angles
    compressed: Angles
    entries: dict[int, Angles]
    """Ratio -> rotations at the entry positions of the rows that close a group."""


Output = tuple[Tensor, Tensor, Tensor]
"""What a sub-layer gave [n, H], and how it goes into the streams: post [n, h], comb [n, h, h]."""


class Backbone:
    """Weights bound to pools. `forward` is the only entry."""

    def __init__(
        self,
        config: TextConfig,
        weights: ModelWeights,
        pools: Pools,
        engram: Engram | None,
        replay: Replay = OFF,
        seat: ExpertSeat | None = None,
    ) -> None:
        """seat: the place among processes that share the experts of the backbone's layers."""
        acc = accumulation_dtype(weights.embed.dtype)
        self.config = config
        self.weights = weights
        self.pools = pools
        self.ops = pools.ops
        self.replay = replay
        self.plain_rope = Rope(config, compressed=False, dtype=acc)
        self._compressed_rope = Rope(config, compressed=True, dtype=acc)
        self._engram = engram
        self._seat = seat
        self._compressor = Compressor(config, pools)
        self._indexer = Indexer(config, pools)
        self._reader = Reader(config, pools)
        self._kv_source = [
            _source(config, config.kv_source_layer_ids, i) for i in range(config.num_hidden_layers)
        ]

    @torch.inference_mode()
    def forward(self, batch: Batch, logit_rows: Tensor | None) -> Tensor:
        """Run the batch, write all caches, return logits [m, vocab] (accumulation dtype) of the
        rows asked for.

        logit_rows: int64 [m], or None for every row; of a batch with rows before `replay_from` in
            mode `compact`, every row that was kept, and only such rows may be asked for.
        """
        c = self.config
        self._copy_snapshot_bases(batch)
        angles = self._angles(batch)
        shared = Shared()
        grams = None
        if self._engram is not None:
            grams = self._engram.compressed(batch.grams(c.lookback))
        embedded = self.weights.embed[batch.ids]
        if batch.images is not None:
            embedded[batch.images.rows] = batch.images.embeddings
        streams = embedded[:, None, :].expand(-1, c.hc_mult, -1).contiguous()
        pending = one_hot_mix(batch.rows, c.hc_mult, accumulation_dtype(embedded.dtype))
        given: Output | None = None  # by the layer before, not in the streams yet
        features: dict[int, Tensor] = {}
        whole = batch
        half, kept = batch.consumers(compact=self.replay.mode == "compact")
        for layer, w in enumerate(self.weights.layers):
            narrows = layer == c.n_producers and half is not batch
            if given is not None and (narrows or w.engram is not None):
                streams, given = self._with(streams, given), None
            if narrows:
                # Every row feeds the first consumer's compressed entries, kept or not.
                self._write_entries(layer, w, self._normed(w, streams, pending), batch, angles)
                if kept is not None:
                    streams, pending = streams[kept], pending[kept]
                    logit_rows = (
                        None if logit_rows is None else torch.searchsorted(kept, logit_rows)
                    )
                    shared.narrow(kept)
                batch, angles = half, self._angles(half)
            if w.engram is not None and self._engram is not None and grams is not None:
                rows = self._engram.rows(layer, grams)
                streams = self._engram.apply(w.engram, rows, streams, batch.image_rows)
            streams, x, pre, post, comb = sub_layer(
                self.ops, c, w.attn_mix, w.attn_norm, streams, pending, given
            )
            if layer in c.dspark_target_layer_ids and self.weights.draft is not None:
                features[layer] = streams.mean(dim=1)
            if layer != c.n_producers or not batch.consumers_only:
                self._write_entries(layer, w, x, batch, angles)
            y = self._attention(layer, w, x, batch, angles, shared)
            streams, x, pending, post, comb = sub_layer(
                self.ops, c, w.ffn_mix, w.ffn_norm, streams, pre, (y, post, comb)
            )
            given = self._moe(layer, w, x, batch.image_rows), post, comb
        if given is not None:
            streams = self._with(streams, given)
        if self.weights.draft is not None:
            context = torch.cat([features[i] for i in c.dspark_target_layer_ids], dim=1)
            if min(c.dspark_target_layer_ids) < c.n_producers:
                batch, angles = whole, self._angles(whole)
            self._write_draft_context(context, batch, angles)
        if logit_rows is not None:
            streams, pending = streams[logit_rows], pending[logit_rows]
        hidden = self.ops.rms_norm(
            self.ops.mhc_collapse(streams, pending), self.weights.norm, c.rms_norm_eps
        )
        return self.ops.linear(hidden.to(pending.dtype), self.weights.head)

    def _with(self, streams: Tensor, given: Output) -> Tensor:
        y, post, comb = given
        return self.ops.mhc_post(y, streams, post, comb)

    def _moe(self, layer: int, w: LayerWeights, x: Tensor, image_rows: Tensor | None) -> Tensor:
        if self._seat is None:
            return moe(self.ops, self.config, w.moe, x, image_rows)
        return moe_in_group(self.ops, self.config, w.moe, x, image_rows, layer, self._seat)

    @torch.inference_mode()
    def without_rows(self) -> Tensor:
        """Take part in a forward pass to which this process brings no row: others need its experts.

        Returns logits [0, vocab]."""
        embed = self.weights.embed
        for layer, w in enumerate(self.weights.layers):
            self._moe(layer, w, embed[:0], None)
        return torch.empty((0, self.config.vocab_size), dtype=accumulation_dtype(embed.dtype))

    def _normed(self, w: LayerWeights, streams: Tensor, pending: Tensor) -> Tensor:
        """What the attention of a layer reads, [n, H]."""
        collapsed = self.ops.mhc_collapse(streams, pending)
        return self.ops.rms_norm(collapsed, w.attn_norm, self.config.rms_norm_eps)

    def _write_entries(
        self, layer: int, w: LayerWeights, x: Tensor, batch: Batch, angles: PassAngles
    ) -> None:
        """Compressed entries and index keys, where the layer is a source of them."""
        if w.compressor is not None and w.index_key is not None:
            at = angles.entries[self.config.compress_ratios[layer]]
            self._compressor.write(layer, x, batch, w.compressor, w.index_key, at)

    def _attention(
        self,
        layer: int,
        w: LayerWeights,
        x: Tensor,
        batch: Batch,
        angles: PassAngles,
        shared: Shared,
    ) -> Tensor:
        c = self.config
        ratio = c.compress_ratios[layer]
        own = angles.compressed if ratio else angles.plain
        latent, q, key = query_key(self.ops, c, w.attn, x, own, self.pools.records.swa_rounding)
        source = self._kv_source[layer] if ratio else None
        if w.indexer is not None and source is not None:
            self._indexer.select(layer, source, x, latent, batch, w.indexer, own, shared)
        out = self._reader.attend(layer, source, q, key, w.attn.sink, batch, shared)
        return self.ops.mla_output(out, *own, w.attn.wo_a, w.attn.wo_b)

    def _write_draft_context(self, features: Tensor, batch: Batch, angles: PassAngles) -> None:
        """Draft layers read keys made of the backbone's features; every fed token leaves one in
        each draft ring."""
        c, draft = self.config, self.weights.draft
        assert draft is not None
        main = self.ops.linear(features, draft.main_proj)
        u = self.ops.rms_norm(main, draft.main_norm, c.rms_norm_eps)
        rows, slots = batch.ring_writes
        for i, w in enumerate(draft.layers):
            key = self.ops.norm_rope_quant(
                self.ops.linear(u, w.attn.wkv),
                w.attn.kv_norm,
                c.rms_norm_eps,
                *angles.plain,
                self.pools.records.swa_rounding,
            )
            self.pools.ring[c.num_hidden_layers + i].store(key[rows], slots)

    def _angles(self, batch: Batch) -> PassAngles:
        entries: dict[int, Angles] = {}
        for ratio in {self.config.compress_ratios[i] for i in self.config.kv_source_layer_ids}:
            entries[ratio] = self._compressed_rope.at(batch.entries(ratio).entry * ratio)
        return PassAngles(
            self.plain_rope.at(batch.position), self._compressed_rope.at(batch.position), entries
        )

    def _copy_snapshot_bases(self, batch: Batch) -> None:
        pairs = batch.snapshot_pairs
        if pairs:
            source, destination = (torch.tensor(side) for side in zip(*pairs, strict=True))
            self.pools.states[destination] = self.pools.states[source]


def _source(config: TextConfig, sources: tuple[int, ...], layer: int) -> int | None:
    return max((s for s in sources if s <= layer), default=None)


def sub_layer(
    ops: Operators,
    config: TextConfig,
    w: MixWeights,
    norm: Tensor,
    streams: Tensor,
    pending: Tensor,
    given: Output | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(the streams with what the sub-layer before gave, what this one reads [n, H], and its mixes
    pre [n, h], post [n, h], comb [n, h, h])."""
    mixes = w.fn, w.base, w.scale, norm
    constants = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    if given is None:
        return streams, *ops.mhc_pre_norm(streams, pending, *mixes, *constants)
    y, post, comb = given
    return ops.mhc_post_pre_norm(y, streams, post, comb, pending, *mixes, *constants)


def one_hot_mix(rows: int, hc_mult: int, dtype: torch.dtype) -> Tensor:
    """The pending mix before the first layer: stream 0 alone."""
    pending = torch.zeros(rows, hc_mult, dtype=dtype)
    pending[:, 0] = 1
    return pending
