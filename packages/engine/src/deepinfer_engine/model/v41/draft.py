"""The DSpark draft module: one block of guesses for the tokens after the anchor.

All b rows of the block see the W context keys before the anchor and each other; a low-rank Markov
head then makes each guess depend on the one before it, so only that head runs b times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from deepinfer_engine.model.v41.attention import Angles, query_key
from deepinfer_engine.model.v41.backbone import Backbone, one_hot_mix, sub_layer
from deepinfer_engine.model.v41.moe import moe
from deepinfer_engine.model.v41.weights import LayerWeights, accumulation_dtype

Pick = Callable[[int, Tensor], Tensor]
"""(draft offset k, logits [R, vocab]) -> tokens int64 [R]."""


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """tokens int64 [R, b]; logits [R, b, vocab] they were picked from; confidence [R, b] of being
    accepted."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class Drafter:
    """Runs the draft layers against the context keys that the backbone left in the draft rings."""

    def __init__(self, backbone: Backbone) -> None:
        draft = backbone.weights.draft
        assert draft is not None, "this checkpoint has no draft module"
        self._backbone = backbone
        self._ops = backbone.ops
        self._draft = draft

    @torch.inference_mode()
    def run(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, length: int, pick: Pick
    ) -> DraftBlock:
        """Draft `length` tokens after each anchor.

        anchors, positions, slots: int64 [R]; the anchor's position equals the number of resident
        tokens.
        """
        c = self._backbone.config
        R = anchors.shape[0]
        ids = torch.full((R, length), c.dspark_noise_token_id)
        ids[:, 0] = anchors
        embedded = self._backbone.weights.embed[ids.view(-1)]
        streams = embedded[:, None, :].expand(-1, c.hc_mult, -1).contiguous()
        pending = one_hot_mix(R * length, c.hc_mult, accumulation_dtype(embedded.dtype))
        angles = self._backbone.plain_rope.at((positions[:, None] + torch.arange(length)).view(-1))
        history, index = self._context(positions, slots, length)
        for i, w in enumerate(self._draft.layers):
            streams, pending = self._layer(i, w, streams, pending, angles, history, index)
        hidden = self._ops.mhc_collapse(streams, pending)
        return self._decode(anchors, hidden.view(R, length, -1), pick)

    def _layer(
        self,
        i: int,
        w: LayerWeights,
        streams: Tensor,
        pending: Tensor,
        angles: Angles,
        history: Tensor,
        index: Tensor,
    ) -> tuple[Tensor, Tensor]:
        c = self._backbone.config
        pools = self._backbone.pools
        streams, x, pre, post, comb = sub_layer(
            self._ops, c, w.attn_mix, w.attn_norm, streams, pending, None
        )
        _, q, own = query_key(self._ops, c, w.attn, x, angles, pools.records.swa_rounding)
        context = pools.ring[c.num_hidden_layers + i].load(history).view(-1, c.head_dim)
        out, _ = self._ops.mla_sparse(
            q, torch.cat([context, own]), index, w.attn.sink, c.head_dim**-0.5
        )
        y = self._ops.mla_output(out, *angles, w.attn.wo_a, w.attn.wo_b)
        streams, x, next_pre, post, comb = sub_layer(
            self._ops, c, w.ffn_mix, w.ffn_norm, streams, pre, (y, post, comb)
        )
        return self._ops.mhc_post(moe(self._ops, c, w.moe, x), streams, post, comb), next_pre

    def _context(self, positions: Tensor, slots: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(ring slots [R, W] of the context keys, index [R*b, W+b] into cat(context, own keys))."""
        c = self._backbone.config
        R, W, ring = positions.shape[0], c.sliding_window, c.ring_slots
        at = positions[:, None] - W + torch.arange(W)
        history = torch.where(at >= 0, slots[:, None] * ring + at % ring, -1)
        context = torch.where(at >= 0, torch.arange(R * W).view(R, W), -1)
        own = R * W + torch.arange(R * length).view(R, length)
        index = torch.cat([context, own], dim=1)
        return history, index.repeat_interleave(length, dim=0)

    def _decode(self, anchors: Tensor, hidden: Tensor, pick: Pick) -> DraftBlock:
        c, w = self._backbone.config, self._draft
        acc = accumulation_dtype(hidden.dtype)
        length = hidden.shape[1]
        normed = self._ops.rms_norm(hidden, w.norm, c.rms_norm_eps)
        base = linear(normed.to(acc), self._backbone.weights.head)
        previous = anchors
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        confidence: list[Tensor] = []
        for k in range(length):
            state = w.markov_embed[previous]
            row = base[:, k] + linear(state, w.markov_head).to(acc)
            joined = torch.cat([hidden[:, k], state], dim=1).to(acc)
            confidence.append(torch.sigmoid(linear(joined, w.confidence))[:, 0])
            previous = pick(k, row)
            tokens.append(previous)
            logits.append(row)
        return DraftBlock(
            torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(confidence, 1)
        )
