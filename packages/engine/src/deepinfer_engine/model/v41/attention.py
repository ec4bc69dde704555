"""One attention sub-layer over a batch: window keys from the ring, compressed entries from blocks,
sinks.

The pieces that several layers share (compressed entries, index keys, selections, candidates) live
in `Shared`, written in layer order and made anew for each forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_engine.adapters.kernels import Operators
from deepinfer_engine.model.v41.batch import Batch
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.v41.pools import Pools, Section
from deepinfer_engine.model.v41.weights import (
    AttentionWeights,
    CompressorWeights,
    IndexerWeights,
    IndexKeyWeights,
)

Angles = tuple[Tensor, Tensor]


@dataclass(slots=True)
class Shared:
    """What layers of one forward pass hand to each other."""

    selection: Tensor | None = None
    """[n, k] entry ids chosen by the last top-k source, ascending, -1 padded."""
    candidates: Tensor | None = None
    """[n, runs] ids of the runs of entries kept by the candidate source, ascending, -1 padded; None
    before it, and while every run is a candidate."""
    entries: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """KV source -> the entries of all sequences [m, D], one sequence behind the other, for passes
    that read most of them."""
    gathered: tuple[Tensor, Tensor] | None = None
    """(entries [m, D], index [n, k] into them) of the current source and selection."""
    chosen: Tensor | None = None
    """[n, k] pool rows of the selection in the pages of the current source."""

    def narrow(self, rows: Tensor) -> None:
        """Go on with these rows only; what is per sequence stays."""
        self.selection = None if self.selection is None else self.selection[rows]
        self.candidates = None if self.candidates is None else self.candidates[rows]
        self.gathered = self.chosen = None


def query_key(
    ops: Operators,
    config: TextConfig,
    w: AttentionWeights,
    x: Tensor,
    angles: Angles,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(qr [n, q_lora_rank], q [n, heads, D], sliding-window key = value [n, D]) of attn-normed
    hidden x [n, H]; the key rounded as its record rounds it."""
    return ops.mla_query_key(
        x,
        w.wq_a,
        w.q_norm,
        w.wq_b,
        w.wkv,
        w.kv_norm,
        *angles,
        config.rms_norm_eps,
        rounding,
    )


class Compressor:
    """Writes the compressed entries and index keys of a KV source layer."""

    def __init__(self, config: TextConfig, pools: Pools) -> None:
        self._config = config
        self._pools = pools
        self._ops = pools.ops

    def write(
        self,
        layer: int,
        x: Tensor,
        batch: Batch,
        w: CompressorWeights,
        key: IndexKeyWeights,
        entry_angles: Angles,
    ) -> None:
        """Store every entry whose group is completed by this batch; entries of open groups wait in
        the state.

        entry_angles: rotations at the closing rows' entry positions (first token of each group).
        """
        c = self._config
        ratio = c.compress_ratios[layer]
        closing = batch.entries(ratio)
        rows, slots = closing.rows, closing.slots
        value = self._ops.linear(x, w.wkv)
        if w.wgate is not None:
            pooled = self._pool(layer, value, self._ops.linear(x, w.wgate), batch).to(x.dtype)
        else:
            pooled = value if len(rows) == len(value) else value[rows]
        if rows.numel() == 0:
            return
        latent = self._ops.rms_norm(pooled, w.norm, c.rms_norm_eps)
        records = self._pools.records
        main = self._ops.rope(latent, *entry_angles, False)
        self._pools.main[layer].store(self._ops.fake_quant(main, records.main_rounding), slots)
        index = self._ops.norm_rope_quant(
            self._ops.linear(latent, key.wk),
            key.norm,
            c.rms_norm_eps,
            *entry_angles,
            records.index_rounding,
        )
        self._pools.index[layer].store(index, slots)

    def _pool(self, layer: int, value: Tensor, gate: Tensor, batch: Batch) -> Tensor:
        """Gated pooling of pairs; the first token of a pair may be from an earlier pass, out of the
        state."""
        state = self._pools.compress[layer]
        value, gate = value.to(state.dtype), gate.to(state.dtype)
        rows, pair = batch.entries(2).rows, batch.pairing(state.shape[1])
        previous = state[pair.slot, pair.before]
        first_gate = torch.where(pair.inside, gate[pair.first], previous[:, 0])
        first_value = torch.where(pair.inside, value[pair.first], previous[:, 1])
        kept = torch.stack([gate[pair.keep], value[pair.keep]], dim=1)
        state[pair.keep_slot, pair.keep_at] = kept
        return self._ops.compress_pool(
            torch.stack([first_value, value[rows]], dim=1),
            torch.stack([first_gate, gate[rows]], dim=1),
        )


class Indexer:
    """Chooses, at a top-k source layer, which compressed entries each row may read."""

    def __init__(self, config: TextConfig, pools: Pools) -> None:
        self._config = config
        self._pools = pools
        self._ops = pools.ops

    def select(
        self,
        layer: int,
        source: int,
        x: Tensor,
        query_latent: Tensor,
        batch: Batch,
        w: IndexerWeights,
        angles: Angles,
        shared: Shared,
    ) -> None:
        """Set `shared.selection` (and candidates at their source) for this and the following
        layers."""
        c = self._config
        ratio = c.compress_ratios[layer]
        shared.gathered = shared.chosen = None
        entries = batch.entries(ratio)
        visible = entries.visible
        is_source = layer == c.candidate_source_layer_id
        if entries.count <= c.index_topk:
            # Everything visible is chosen: the scores cannot change the set.
            entry = torch.arange(max(entries.count, 1))
            shared.selection = torch.where(entry < visible[:, None], entry, -1)
            if is_source:
                shared.candidates = None
            return
        n = x.shape[0]
        q = self._ops.rope(
            self._ops.linear(query_latent, w.wq_b).view(n, c.index_n_heads, c.index_head_dim),
            *angles,
            False,
        )
        keys = self._pools.index[source]
        # While every run of entries is a candidate, none has to be kept.
        keeps = is_source and entries.count > c.candidate_topk_blocks * c.candidate_block_size
        shared.selection, kept = self._ops.index_topk(
            self._ops.fake_quant(q, self._pools.records.index_rounding),
            self._ops.linear(x, w.weights_proj),
            keys.view,
            batch.table,
            batch.first,
            visible,
            keys.record,
            c.index_topk,
            keys.entries,
            c.candidate_block_size,
            c.candidate_topk_blocks if keeps else 0,
            None if is_source else shared.candidates,
        )
        if is_source:
            shared.candidates = kept if keeps else None


class Reader:
    """Gathers what a layer's rows attend to and runs the attention."""

    def __init__(self, config: TextConfig, pools: Pools) -> None:
        self._config = config
        self._pools = pools
        self._ops = pools.ops
        self._scale = config.head_dim**-0.5

    def attend(
        self,
        layer: int,
        source: int | None,
        q: Tensor,
        key: Tensor,
        sink: Tensor,
        batch: Batch,
        shared: Shared,
    ) -> Tensor:
        """Softmax over window keys, selected entries of `source` and the sink: [n, heads, D].

        Also writes this batch's keys into the ring. Where their slots overlap those still to be
        read, the ring is read first, into a matrix of its own; else attention reads the caches
        where they lie.
        """
        ring = self._pools.ring[layer]
        rows, slots = batch.ring_writes
        if batch.writes_first:
            ring.store(key if len(rows) == len(key) else key[rows], slots)
            entries, chosen = self._entry_pages(source, batch, shared)
            out, _ = self._ops.mla_decode_sparse(
                q,
                ring.view,
                batch.ring_reads,
                ring.record,
                None if entries is None else entries.view,
                chosen,
                ring.record if entries is None else entries.record,
                sink,
                self._scale,
                ring.entries,
                None if entries is None else entries.entries,
            )
            return out
        window = batch.window
        parts = [key]
        if window.width:
            history = ring.load(window.history_slots).view(-1, self._config.head_dim)
            parts.insert(0, history)
        index = window.index
        if source is not None:
            gathered, entry_index = self._gathered(source, batch, shared)
            base = sum(p.shape[0] for p in parts)
            parts.append(gathered)
            index = torch.cat([index, torch.where(entry_index >= 0, entry_index + base, -1)], dim=1)
        keys = torch.cat(parts) if len(parts) > 1 else parts[0]
        out, _ = self._ops.mla_sparse(q, keys, index, sink, self._scale)
        ring.store(key[rows], slots)
        return out

    def _entry_pages(
        self, source: int | None, batch: Batch, shared: Shared
    ) -> tuple[Section | None, Tensor | None]:
        """(the pages of compressed entries, pool rows [n, k] chosen from them)."""
        if source is None:
            return None, None
        selection = shared.selection
        assert selection is not None, "a layer with compressed entries follows a top-k source"
        if shared.chosen is None:
            shared.chosen = batch.entry_slots(selection, self._config.compress_ratios[source])
        return self._pools.main[source], shared.chosen

    def _gathered(self, source: int, batch: Batch, shared: Shared) -> tuple[Tensor, Tensor]:
        if shared.gathered is not None:
            return shared.gathered
        selection = shared.selection
        assert selection is not None, "a layer with compressed entries follows a top-k source"
        ratio = self._config.compress_ratios[source]
        section = self._pools.main[source]
        every = batch.all_entries(ratio)
        if selection.numel() < len(every.slots):
            # Few rows: fetch just what they chose.
            entries = section.load(batch.entry_slots(selection, ratio).view(-1))
            index = torch.arange(selection.numel()).view_as(selection)
        else:
            cached = shared.entries.get(source)
            if cached is None:
                cached = shared.entries[source] = section.load(every.slots)
            entries = cached
            index = selection + every.first[:, None]
        shared.gathered = (entries, torch.where(selection >= 0, index, -1))
        return shared.gathered
