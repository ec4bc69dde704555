"""What a family of models gives, and what the rest of the engine asks of it.

A family answers to some `architectures` of config.json. It reads its configuration, says where
every cached byte lives, and runs the forward pass. Loading, sampling, verification, pools, prefix
cache, transfer and speculation are shared and do not know it. Nothing here imports torch: the
process that serves HTTP reads configurations too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from deepinfer_engine.core.device import CPU, Device
from deepinfer_engine.core.pictures import Picture, PictureRules
from deepinfer_engine.core.runner import CacheLayout, DecodeRow, IntArray, PrefillChunk

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer_engine.adapters.dspark import (
        CounterRng,
        GroupReducer,
        Proposal,
        SamplingBatch,
    )
    from deepinfer_engine.model.sequence_rows import SequenceRows

CodecKind = Literal["deepseek_v41", "template"]
"""How conversations become prompts: the V4.1 encoding, or the chat template of the checkpoint."""
CacheQuant = Literal["reference", "none"]
WeightForm = Literal["stored", "wide"]
"""`stored`: matrices that a GGUF file holds in 8 or 4 bits stay so, and their products round
activations to int8 per 32 channels, as GGUF's own do. `wide`: all are widened to `dtype`."""
ReplayMode = Literal["off", "mask", "compact"]
"""`off`: exact. `mask`: every row runs, windows are cut as in `compact` (for comparison).
`compact`: early rows are dropped at the first consumer layer."""


class FamilyConfig(Protocol):
    """A checked config.json, as far as shared code reads it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output together."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def picture_rules(self) -> PictureRules | None:
        """What prompts with pictures must be like; None for a model of text alone."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a checkpoint is loaded. Names as in `build_runner`."""

    dtype: str = "float32"
    cache_quant: CacheQuant = "reference"
    vision: bool = True
    replay: ReplayMode = "off"
    keep: int | None = None
    device: Device = CPU
    weights: WeightForm = "stored"
    seat: ExpertSeat | None = None
    """This process's share of the routed experts; None: all of them."""
    batch_invariant: bool = False
    """A row's logits have the same bits whatever rows are computed beside it."""
    tower: bool = True
    """False: embeddings of pictures come from another process."""


class ExpertSeat(Protocol):
    """One process's place in a group that shares the routed experts of a model.

    A family asks in this order: `place`, then `memory` for its pools, then `hold` with the weights
    it read; `routed` during forward passes, in which all processes of the group take part.
    """

    def place(self, layers: int, experts: int) -> IntArray:
        """int64 [layers, slots]: the expert that each slot of this process holds at the start.

        Raises ConfigError where they cannot be shared so."""
        ...

    def memory(self, name: str, nbytes: int) -> Tensor:
        """uint8 [nbytes], zero, the same memory in every process of the group."""
        ...

    def hold(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """[layer][part] tensors [slots, ...] of this process's slots. Rows change in place, between
        forward passes, when experts move."""
        ...

    def routed(
        self,
        layer: int,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Weighted sum [n, H] of the chosen experts' outputs; collective.

        x: [n, H], n >= 0; experts: int64 [n, k]; weights: [n, k]. compute: (tokens [m, H], slot of
        this process int64 [m, 1], weight [m, 1]) -> weighted outputs [m, H]. Raises EngineLost.
        """
        ...


class ExpertLeader(Protocol):
    """The first process of such a group, which schedules and samples."""

    @property
    def seat(self) -> ExpertSeat: ...

    @property
    def sums(self) -> GroupReducer | None:
        """Of processes that draft for sequences of their own: they choose budgets together."""
        ...

    def lead(self, model: LoadedModel) -> LoadedModel:
        """This process's model and those of the others as one. Raises EngineError."""
        ...


class DraftSource(Protocol):
    """Guesses the next tokens of running sequences."""

    @property
    def most(self) -> int:
        """Drafts a step, at most."""
        ...

    def propose(
        self,
        rows: Sequence[DecodeRow],
        lens: IntArray,
        length: int,
        sampling: SamplingBatch,
        rng: CounterRng,
    ) -> Proposal:
        """`length` drafts for every row, of which the first `lens[i]` may be verified."""
        ...


class LoadedModel(Protocol):
    """Weights bound to cache memory."""

    @property
    def config(self) -> FamilyConfig: ...

    @property
    def layout(self) -> CacheLayout: ...

    @property
    def lookback(self) -> int:
        """Tokens before a chunk that the model must be told."""
        ...

    @property
    def window(self) -> int:
        """Positions before a border that a state at this border must hold; 0 without a state."""
        ...

    @property
    def window_rows(self) -> int:
        """Rows a state keeps of each layer; 0 without a state."""
        ...

    @property
    def window_layers(self) -> int:
        """Layers of windows on top of each other that early prompt tokens run through."""
        ...

    @property
    def replay_keep(self) -> int:
        """Only so many last tokens of a prompt run through all layers; 0 = all."""
        ...

    @property
    def blocks(self) -> Tensor:
        """uint8 [num_blocks, block_bytes]."""
        ...

    @property
    def states(self) -> Tensor:
        """uint8 [num_slots, state_bytes]."""
        ...

    @property
    def drafts(self) -> DraftSource | None:
        """The draft module that was trained with the model."""
        ...

    def rows_of(self, chunk: PrefillChunk) -> SequenceRows: ...

    def forward(self, rows: Sequence[SequenceRows], logit_rows: Tensor | None) -> Tensor:
        """Write all caches and return the logits [m, vocab] of the rows asked for, or of all."""
        ...

    def dense_weights(self) -> list[Tensor]:
        """Every parameter a text step reads: all but the embedding rows it skips."""
        ...


class Tower(Protocol):
    """What `load_tower(model_dir, options)` of a family gives: its vision weights alone."""

    @property
    def rules(self) -> PictureRules: ...

    def spans(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """Embeddings [length, channels] of each picture, in the model dtype, in one pass."""
        ...


class Family(Protocol):
    """One module of this package, or of another distribution by the entry point
    `deepinfer.families`.

    One whose models take a `LoadOptions.seat` says so with an attribute `shares_experts`, True. One
    whose pictures another process may encode has a method `load_tower`, see `Tower`."""

    @property
    def name(self) -> str: ...

    @property
    def architectures(self) -> tuple[str, ...]: ...

    @property
    def codec(self) -> CodecKind: ...

    def read_config(self, raw: Mapping[str, Any]) -> FamilyConfig:
        """Raises pydantic's ValidationError: a key is missing or has a value that cannot work."""
        ...

    def load(
        self, model_dir: Path, options: LoadOptions, *, num_blocks: int | None, num_slots: int
    ) -> LoadedModel:
        """Check the whole checkpoint, read it and allocate its pools.

        Raises CheckpointError naming the tensor or file at fault, ConfigError for an option.
        """
        ...
