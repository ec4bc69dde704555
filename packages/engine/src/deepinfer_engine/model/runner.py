"""The real model behind `StepRunner`: torch on CPU, pools included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.adapters.dspark import (
    CounterRng,
    Proposal,
    SamplingBatch,
    Verifier,
    VerifyResult,
    sample_drafts,
)
from deepinfer_engine.core.masks import mask_rows
from deepinfer_engine.core.pictures import text_only
from deepinfer_engine.core.runner import CacheLayout, Caps, DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.types import TokenLogprob
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.assembly import assemble
from deepinfer_engine.model.batch import Batch, SequenceRows
from deepinfer_engine.model.config import BLOCK_TOKENS, ModelConfig, load_config
from deepinfer_engine.model.draft import Drafter
from deepinfer_engine.model.engram import Engram
from deepinfer_engine.model.image_rows import Images
from deepinfer_engine.model.layout import CacheQuant
from deepinfer_engine.model.pools import Pools
from deepinfer_engine.model.replay import OFF, Replay, ReplayMode
from deepinfer_engine.model.sampling_arrays import sampling_batch
from deepinfer_engine.model.v41 import Backbone
from deepinfer_engine.model.vision import VisionTower
from deepinfer_engine.model.weights import ModelWeights, tensors_of


def build_runner(
    model_dir: Path,
    *,
    dtype: str = "float32",
    nextn: int | None = None,
    num_blocks: int,
    num_state_slots: int,
    cache_quant: CacheQuant = "reference",
    max_model_len: int | None = None,
    vision: bool = True,
    replay: ReplayMode = "off",
    keep: int | None = None,
) -> TorchRunner:
    """Load a checkpoint directory and allocate its pools.

    nextn: drafts a decode step, default the model's; 0 switches speculation off.
    num_blocks, num_state_slots: pool sizes, scratch 0 included.
    vision: load the tower of a checkpoint that has one; False serves text alone.
    replay, keep: bounded replay of prompts; `keep` defaults to the least that is legal and a block
        more, so that the last border of every prompt has a whole state to store.

    Raises ConfigError for an unusable argument, CheckpointError for an unusable model directory.
    """
    if replay != "off" and keep is None:
        keep = load_config(model_dir).text_config.ring_slots + BLOCK_TOKENS
    parts = assemble(
        model_dir,
        dtype=dtype,
        cache_quant=cache_quant,
        vision=vision,
        replay=replay,
        keep=keep,
    )
    config, text = parts.config, parts.config.text_config
    depth = text.dspark_block_size if text.num_nextn_predict_layers else 0
    chosen = depth if nextn is None else nextn
    if not 0 <= chosen <= depth:
        raise ConfigError(f"nextn must be in 0..{depth} for this model, got {chosen}")
    length = text.max_position_embeddings if max_model_len is None else max_model_len
    if not 1 < length <= text.max_position_embeddings:
        raise ConfigError(
            f"max_model_len must be in 2..{text.max_position_embeddings}, got {length}"
        )
    caps = Caps(
        vocab_size=text.vocab_size,
        max_model_len=length,
        nextn=chosen,
        lookback=text.lookback,
        eos_token_id=config.eos_token_id,
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        pictures=config.picture_rules if vision else None,
        replay_keep=parts.replay.keep,
        window=text.sliding_window,
    )
    pools = parts.pools(num_blocks, num_state_slots)
    return TorchRunner(config, parts.weights, pools, parts.engram, caps, parts.replay)


class TorchRunner:
    """Implements `StepRunner` with the V4.1 model and its draft module."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        pools: Pools,
        engram: Engram | None,
        caps: Caps,
        replay: Replay = OFF,
    ) -> None:
        self._config = config.text_config
        self._pools = pools
        self._backbone = Backbone(self._config, weights, pools, engram, replay)
        self._drafter = Drafter(self._backbone) if caps.nextn else None
        self._tower = VisionTower.of(config, weights)
        self._caps = caps
        self._verifier = Verifier()
        self._rng = CounterRng()

    @property
    def caps(self) -> Caps:
        return self._caps

    @property
    def layout(self) -> CacheLayout:
        return self._pools.layout

    def dense_weights(self) -> list[Tensor]:
        """Every parameter a text step reads: all but the embedding rows it skips."""
        weights = replace(self._backbone.weights, vision=None)
        return [t for t in tensors_of(weights) if t is not weights.embed]

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        """Run prompt chunks as one batch; sample the first token of those that are complete."""
        batch = Batch(
            self._config,
            [
                SequenceRows(
                    c.token_ids,
                    c.start,
                    c.lookback,
                    c.block_table,
                    c.state_slot,
                    c.snapshots,
                    images=self._images(c),
                    replay_from=self._backbone.replay.start(c.prompt_len),
                )
                for c in chunks
            ],
        )
        last = batch.first_row + batch.length - 1
        sampled = [i for i, c in enumerate(chunks) if c.sample]
        logits = self._backbone.forward(batch, last[sampled])
        outputs: list[StepOutput | None] = [None] * len(chunks)
        if sampled:
            first = self._first_tokens([chunks[i] for i in sampled], logits)
            for i, output in zip(sampled, first, strict=True):
                outputs[i] = output
        return outputs

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        """Draft, run the target over anchors and drafts, verify, emit."""
        params = [r.sampling for r in rows]
        sampling = sampling_batch(
            params, [r.history for r in rows], [r.prompt_len for r in rows], self._caps.eos_token_id
        )
        proposal, lens = self._draft(rows, sampling)
        lookback = self._caps.lookback
        batch = Batch(
            self._config,
            [
                SequenceRows(
                    np.concatenate([[r.history[-1]], proposal.tokens[i, : lens[i]]]).astype(
                        np.int64
                    ),
                    len(r.history) - 1,
                    _lookback(r, lookback),
                    r.block_table,
                    r.state_slot,
                )
                for i, r in enumerate(rows)
            ],
        )
        logits = self._backbone.forward(batch, None)
        cu = np.concatenate([[0], np.cumsum(lens + 1)])
        result = self._verifier.verify(
            logits,
            cu,
            proposal,
            lens,
            sampling,
            masks=mask_rows([r.constraint for r in rows], proposal.tokens, lens),
            rng=self._rng,
            logprobs=_most_logprobs(rows),
        )
        return [
            _output(result, i, r.sampling.logprobs, drafted=int(lens[i]))
            for i, r in enumerate(rows)
        ]

    def block_bytes(self, block_id: int) -> memoryview:
        """Writable view of one block's bytes."""
        return self._pools.blocks[block_id].numpy().data

    def state_bytes(self, slot: int) -> memoryview:
        """Writable view of one state slot's bytes."""
        return self._pools.states[slot].numpy().data

    def clear_state(self, slot: int) -> None:
        """Zero a slot: nothing of an earlier owner may reach storage or a peer."""
        self._pools.states[slot].zero_()

    def _images(self, chunk: PrefillChunk) -> Images:
        """(offset in the chunk, embeddings) of what lies in it of each picture."""
        if not chunk.pictures:
            return ()
        assert self._tower is not None, "pictures for a model without a tower"
        end = chunk.start + len(chunk.token_ids)
        parts: list[tuple[int, Tensor]] = []
        for picture in chunk.pictures:
            low, high = max(picture.start, chunk.start), min(picture.end, end)
            span = self._tower.span(picture)
            parts.append((low - chunk.start, span[low - picture.start : high - picture.start]))
        return tuple(parts)

    def _first_tokens(self, chunks: Sequence[PrefillChunk], logits: Tensor) -> list[StepOutput]:
        ends = [c.start + len(c.token_ids) for c in chunks]
        sampling = sampling_batch(
            [c.sampling for c in chunks],
            [c.prompt for c in chunks],
            ends,
            self._caps.eos_token_id,
            ends,
        )
        none = Proposal.empty(len(chunks))
        result = self._verifier.verify(
            logits,
            np.arange(len(chunks) + 1),
            none,
            np.zeros(len(chunks), dtype=np.int64),
            sampling,
            masks=mask_rows([c.constraint for c in chunks]),
            rng=self._rng,
            logprobs=_most_logprobs(chunks),
        )
        return [_output(result, i, c.sampling.logprobs, drafted=0) for i, c in enumerate(chunks)]

    def _draft(
        self, rows: Sequence[DecodeRow], sampling: SamplingBatch
    ) -> tuple[Proposal, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Drafts of the whole block for every row, cut to what each row may use."""
        lens = np.array([r.max_draft for r in rows], dtype=np.int64)
        if self._drafter is None or not lens.any():
            return Proposal.empty(len(rows)), np.zeros(len(rows), dtype=np.int64)
        # Noise is keyed by the anchor's position: it advances every round, so no key is used twice.
        rounds = sampling.positions
        laws: list[Tensor] = []

        def pick(offset: int, logits: Tensor) -> Tensor:
            tokens, law = sample_drafts(logits, sampling, rounds, offset, self._rng)
            laws.append(law)
            return torch.from_numpy(np.asarray(tokens, dtype=np.int64))

        block = self._drafter.run(
            torch.tensor([r.history[-1] for r in rows]),
            torch.tensor([len(r.history) - 1 for r in rows]),
            torch.tensor([r.state_slot for r in rows]),
            self._caps.nextn,
            pick,
        )
        greedy = not sampling.temperature.any()
        return (
            Proposal(
                tokens=block.tokens.numpy(),
                lengths=lens,
                q=None if greedy else torch.stack(laws, dim=1),
                conf=block.confidence.to(torch.float32).numpy(),
            ),
            lens,
        )


def _lookback(row: DecodeRow, size: int) -> tuple[int, ...]:
    """The up to `size` tokens before the anchor, oldest first."""
    first = max(0, len(row.history) - 1 - size)
    before = row.history[first:-1]
    return text_only(before, first, row.pictures) if row.pictures else tuple(before)


def _most_logprobs(items: Sequence[DecodeRow] | Sequence[PrefillChunk]) -> int | None:
    asked = [i.sampling.logprobs for i in items if i.sampling.logprobs is not None]
    return max(asked) if asked else None


def _output(result: VerifyResult, i: int, logprobs: int | None, *, drafted: int) -> StepOutput:
    low, high = int(result.cu_tokens[i]), int(result.cu_tokens[i + 1])
    tokens = tuple(result.tokens[low:high].tolist())
    details: tuple[TokenLogprob, ...] = ()
    if logprobs is not None and result.logprobs is not None:
        details = tuple(
            TokenLogprob(
                int(result.tokens[at]), float(result.logprobs[at]), _top(result, at, logprobs)
            )
            for at in range(low, high)
        )
    return StepOutput(
        tokens=tokens,
        n_drafted=drafted,
        n_accepted=max(len(tokens) - 1, 0),
        logprobs=details,
        failed=bool(result.dead[i]),
    )


def _top(result: VerifyResult, at: int, count: int) -> tuple[tuple[int, float], ...]:
    if not count or result.top_ids is None or result.top_logprobs is None:
        return ()
    pairs = zip(
        result.top_ids[at, :count].tolist(), result.top_logprobs[at, :count].tolist(), strict=True
    )
    return tuple((int(token), float(logprob)) for token, logprob in pairs)
