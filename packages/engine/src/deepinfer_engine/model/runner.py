"""A loaded model of any family behind `StepRunner`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.adapters.dspark import GroupReducer, Proposal, SamplingBatch
from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.core.pictures import text_only
from deepinfer_engine.core.runner import (
    CacheLayout,
    Caps,
    DecodeRow,
    IntArray,
    PrefillChunk,
    StepOutput,
)
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.model.calibration import step_key, steps_home
from deepinfer_engine.model.copied import DRAFTS, MOST_DRAFTS, CopiedDrafts, CopyBudget
from deepinfer_engine.model.family import (
    CacheQuant,
    ExpertLeader,
    LoadedModel,
    LoadOptions,
    ReplayMode,
    WeightForm,
)
from deepinfer_engine.model.placement import tensors_on
from deepinfer_engine.model.registry import family_of
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.speculation import DraftBudget, StepTimes
from deepinfer_engine.model.verification import Sampler, prompt_logprobs


def build_runner(
    model_dir: Path,
    *,
    dtype: str = "float32",
    nextn: int | None = None,
    num_blocks: int | None = None,
    num_state_slots: int,
    cache_quant: CacheQuant = "reference",
    max_model_len: int | None = None,
    vision: bool = True,
    tower: bool = True,
    replay: ReplayMode = "off",
    keep: int | None = None,
    device: Device = CPU,
    weights: WeightForm = "stored",
    group: ExpertLeader | None = None,
    coupled: bool | None = None,
    batch_invariant: bool = False,
) -> TorchRunner:
    """Load a checkpoint directory and allocate its pools.

    nextn: drafts a decode step, default the model's, or 5 copied from the text where it has no
        draft module; 0 switches speculation off.
    num_blocks, num_state_slots: pool sizes, scratch 0 included; unset blocks are 1024, or as many
        as 2 GiB hold.
    vision: take pictures where the checkpoint has a tower; False serves text alone.
    tower: load it; False: pictures come with their embeddings (`Picture.rows`).
    replay, keep: bounded replay of prompts; `keep` defaults to the least that is legal and a block
        more, so that the last border of every prompt has a whole state to store.
    coupled: how drafts are verified where a request does not say, see `SamplingParams`; None:
        coupled.
    batch_invariant: logits of a token have the same bits in any batch, read in any chunks; slower.
    weights: "stored" keeps 8- and 4-bit matrices of a GGUF file as they are, "wide" widens them.
    group: processes that share the routed experts with this one; closed by whoever made it.

    Raises ConfigError for an unusable argument, CheckpointError for an unusable model directory,
    EngineLost where a process of the group ended.
    """
    seat = None if group is None else group.seat
    options = LoadOptions(
        dtype, cache_quant, vision, replay, keep, device, weights, seat, batch_invariant, tower
    )
    family = family_of(model_dir)
    if seat is not None and not getattr(family, "shares_experts", False):
        raise ConfigError(f"ep: {family.name} models have no experts that processes could share")
    with tensors_on(device):
        model = family.load(model_dir, options, num_blocks=num_blocks, num_slots=num_state_slots)
    if group is not None:
        model = group.lead(model)
    config = model.config
    usual, depth = _draft_lengths(model)
    chosen = usual if nextn is None else nextn
    if not 0 <= chosen <= depth:
        raise ConfigError(f"nextn must be in 0..{depth} for this model, got {chosen}")
    length = config.max_model_len if max_model_len is None else max_model_len
    if not 1 < length <= config.max_model_len:
        raise ConfigError(f"max_model_len must be in 2..{config.max_model_len}, got {length}")
    caps = Caps(
        vocab_size=config.vocab_size,
        max_model_len=length,
        nextn=chosen,
        lookback=model.lookback,
        eos_token_ids=config.eos_token_ids,
        num_blocks=len(model.blocks),
        num_state_slots=num_state_slots,
        pictures=config.picture_rules if vision else None,
        replay_keep=model.replay_keep,
        window=model.window,
        window_rows=model.window_rows,
        window_layers=model.window_layers,
    )
    sums = None if group is None or not chosen else group.sums
    # What was measured is a step of one process; and all of a group need the same table.
    times = None if sums else StepTimes.load(steps_home(), step_key(model, dtype, device))
    # Of a step in several processes this thread's own work is a part: there the clock is time.
    clock = time.thread_time if group is None else time.perf_counter
    return TorchRunner(model, caps, device, times, clock, coupled=coupled, group=sums)


def _draft_lengths(model: LoadedModel) -> tuple[int, int]:
    """Drafts a step where nobody says how many, and the most one may ask for."""
    if model.drafts is not None:
        return model.drafts.most, model.drafts.most
    # A state has room for the drafts of the model's own module and for no others.
    return (0, 0) if model.window else (DRAFTS, MOST_DRAFTS)


class TorchRunner:
    """Implements `StepRunner`: draft, forward, verify."""

    def __init__(
        self,
        model: LoadedModel,
        caps: Caps,
        device: Device = CPU,
        times: StepTimes | None = None,
        clock: Callable[[], float] = time.thread_time,
        *,
        coupled: bool | None = None,
        group: GroupReducer | None = None,
    ) -> None:
        """Without a draft module of the model drafts are copied from the text.

        times: measured step times; they and those of its own steps decide how many drafts pay.
        group: see `DraftBudget`.
        clock: seconds, by default of this thread's work: neighbours do not count."""
        self._model = model
        self._caps = caps
        self._device = device
        own = model.drafts
        self._drafts = (own or CopiedDrafts(caps.nextn)) if caps.nextn else None
        self._clock = clock
        self._sampler = Sampler(caps.eos_token_ids, coupled=coupled is not False)
        length = max(caps.nextn, 1)
        self._budget = (
            CopyBudget(length)
            if own is None
            else DraftBudget(times or StepTimes.assumed(), length, group)
        )

    @property
    def caps(self) -> Caps:
        return self._caps

    @property
    def layout(self) -> CacheLayout:
        return self._model.layout

    @property
    def model(self) -> LoadedModel:
        """What computes; its pools are this runner's."""
        return self._model

    def dense_weights(self) -> list[Tensor]:
        """Every parameter a text step reads: all but the embedding rows it skips."""
        return self._model.dense_weights()

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        """Run prompt chunks as one batch; sample the first token of those that are complete."""
        return self.mixed(chunks, ())[0]

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        """Draft, run the target over anchors and drafts, verify, emit."""
        return self.mixed((), rows)[1]

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        """One forward pass over both: rows first, then chunks."""
        began = self._clock()
        outputs: list[StepOutput] = []
        drafted, n = False, 0
        with tensors_on(self._device):
            fed, step = list[SequenceRows](), None
            if rows:
                sampling = self._sampler.arrays(rows)
                lens, proposal = self._propose(rows, sampling)
                step = sampling, lens, proposal
                counts = lens.tolist()
                fed = [
                    self._rows_of(row, proposal.tokens[i, :count].tolist() if count else ())
                    for i, (row, count) in enumerate(zip(rows, counts, strict=True))
                ]
                n = len(rows) + sum(counts)
            else:
                self._budget.sits_out(0)
            read = _ReadRows(chunks, n) if chunks else None
            fed += [self._model.rows_of(c) for c in chunks]
            logits = self._model.forward(fed, None if read is None else read.wanted)
            if step is not None:
                sampling, lens, proposal = step
                outputs = self._sampler.verify(rows, logits[:n], proposal, lens, sampling)
                drafted = proposal.tokens.shape[1] > 0
                if drafted:
                    self._budget.observe(lens, np.array([o.n_accepted for o in outputs]))
            first = [] if read is None else read.outputs(self._sampler, logits)
        if self._drafts is not None and rows and not chunks:
            spent = (self._clock() - began) * 1e3
            made = sum(len(o.tokens) for o in outputs)
            self._budget.timed(len(rows), n, made, spent, drafted=drafted)
        return first, outputs

    def block_bytes(self, block_id: int) -> memoryview:
        """Writable view of one block's bytes."""
        return self._model.blocks[block_id].numpy().data

    def state_bytes(self, slot: int) -> memoryview:
        """Writable view of one state slot's bytes."""
        return self._model.states[slot].numpy().data

    def clear_state(self, slot: int) -> None:
        """Zero a slot: nothing of an earlier owner may reach storage or a peer."""
        self._model.states[slot].zero_()

    def _propose(
        self, rows: Sequence[DecodeRow], sampling: SamplingBatch
    ) -> tuple[IntArray, Proposal]:
        """(drafts to verify of each row, drafts); none where they would not pay."""
        most = np.array([r.max_draft for r in rows], dtype=np.int64)
        drafts = self._drafts
        if drafts is None or not most.any() or not self._budget.pays(len(rows)):
            self._budget.sits_out(len(rows))
            return np.zeros_like(most), Proposal.empty(len(rows))
        rng = self._sampler.rng
        proposal = drafts.propose(rows, most, self._caps.nextn, sampling, rng)
        return self._budget.lengths(proposal, most), proposal

    def _rows_of(self, row: DecodeRow, drafts: Sequence[int]) -> SequenceRows:
        return SequenceRows(
            np.array([row.history[-1], *drafts], dtype=np.int64),
            len(row.history) - 1,
            _lookback(row, self._caps.lookback),
            row.block_table,
            row.state_slot,
        )


def _lookback(row: DecodeRow, size: int) -> tuple[int, ...]:
    """The up to `size` tokens before the anchor, oldest first."""
    if not size:
        return ()
    first = max(0, len(row.history) - 1 - size)
    before = row.history[first:-1]
    return text_only(before, first, row.pictures) if row.pictures else tuple(before)


class _ReadRows:
    """Which rows of logits the chunks of a step want, and what becomes of them."""

    def __init__(self, chunks: Sequence[PrefillChunk], before: int) -> None:
        """before: rows of logits that stand before those of the chunks, all wanted."""
        self._chunks = chunks
        at, wanted = before, [np.arange(before)]
        for chunk in chunks:
            end = at + len(chunk.token_ids)
            if chunk.prompt_logprobs is not None:
                wanted.append(np.arange(at, end))
            elif chunk.sample:
                wanted.append(np.array([end - 1]))
            at = end
        self._before = before
        self.wanted = torch.from_numpy(np.concatenate(wanted))

    def outputs(self, sampler: Sampler, logits: Tensor) -> list[StepOutput | None]:
        """logits: of the wanted rows."""
        outputs: list[StepOutput | None] = [None] * len(self._chunks)
        at, sampled, ends = self._before, list[int](), list[int]()
        for i, chunk in enumerate(self._chunks):
            rows = len(chunk.token_ids) if chunk.prompt_logprobs is not None else int(chunk.sample)
            if chunk.prompt_logprobs is not None:
                said = logits[at : at + rows]
                found = prompt_logprobs(said, chunk.following, chunk.prompt_logprobs)
                outputs[i] = StepOutput((), prompt_logprobs=found)
            at += rows
            if chunk.sample:
                sampled.append(i)
                ends.append(at - 1)
        if sampled:
            chunks = [self._chunks[i] for i in sampled]
            for i, output in zip(sampled, sampler.first_tokens(chunks, logits[ends]), strict=True):
                known = outputs[i]
                outputs[i] = (
                    output
                    if known is None
                    else replace(output, prompt_logprobs=known.prompt_logprobs)
                )
        return outputs
