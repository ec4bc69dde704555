"""What a model must offer to the scheduler: `StepRunner`, and the values it takes and gives.

The scheduler owns *where* things are (block ids, state slots, positions); the runner owns *what* is
computed. Nothing here imports torch, so the policy code runs anywhere.

Positions and counts. `L` = committed tokens of a sequence, `N` = tokens whose KV is resident. In
decode `N == L - 1`: the last committed token, the *anchor*, has not been fed yet.

Storage. Block `b` holds the compressed KV and index keys of 128 consecutive tokens; id 0 is scratch
and is never handed out. A state slot holds what exists once per sequence: sliding-window rings of
all layers, draft rings, compress state; slot 0 is scratch. Both are plain bytes with a fixed
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from deepinfer_engine.core.pictures import Picture, PictureRules
from deepinfer_engine.core.types import SamplingParams, TokenLogprob
from deepinfer_engine.core.windows import Recovery, RecoveryMode

IntArray = npt.NDArray[np.int64]
MaskRows = npt.NDArray[np.int32]

BLOCK_TOKENS = 128
"""Tokens per KV block: the grain of storage, transfer and prefix hits."""


@dataclass(frozen=True, slots=True)
class Region:
    """A named byte range inside one block or one state slot; `layer` is the owning layer."""

    name: str
    layer: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The bytes of one block and one state slot. Equal `layout_hash` means the bytes can be
    exchanged."""

    block_tokens: int
    block_bytes: int
    state_bytes: int
    block_regions: tuple[Region, ...]
    state_regions: tuple[Region, ...]
    layout_hash: str
    """Hex digest over record formats, layer order, ratios, ring size, dtype and model
    fingerprint."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of a runner. `max_model_len` bounds prompt + output; `nextn` is the draft length (0 =
    off)."""

    vocab_size: int
    max_model_len: int
    nextn: int
    lookback: int
    """How many tokens before a chunk the model must be told (n-gram hashing)."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    num_state_slots: int
    pictures: PictureRules | None = None
    """None: prompts are text alone."""
    replay_keep: int = 0
    """Only so many last tokens of a prompt run through all layers (bounded replay); 0 = all."""
    window: int = 0
    """Positions before a border that a state at this border must hold."""
    window_rows: int = 0
    """Rows that a state keeps of each layer: the window, and what a step may run ahead."""
    window_layers: int = 0
    """Layers of windows on top of each other that early prompt tokens run through."""

    def snapshot_from(self, prompt_len: int) -> int:
        """First position at which the state of such a prompt is whole while it is read."""
        skipped = self._skipped(prompt_len)
        return skipped + self.window if skipped else 0

    @property
    def exact_replay(self) -> int:
        """Tokens before a border after which its state is that of a run from the start: a window
        loses one position a layer. 0 = there is no such state."""
        return (self.window_layers - 1) * (self.window - 1) + self.window_rows if self.window else 0

    def replay_start(self, border: int, prompt_len: int) -> int:
        """Where such a replay begins for a prompt of this length; 0 = it would be all of it."""
        start = border - self.exact_replay
        skipped = self._skipped(prompt_len)
        if self.replay_keep and not skipped:
            return 0  # all layers run from the start
        if 0 < skipped < border:
            # Layers above begin before the border, and what they read there must be exact too.
            start = min(start, skipped - self.window_layers * (self.window - 1))
        return max(0, start)

    def recovery(self, mode: RecoveryMode) -> Recovery:
        """What that mode means for this model."""
        return Recovery(mode, self.exact_replay, self.window)

    def _skipped(self, prompt_len: int) -> int:
        return max(0, prompt_len - self.replay_keep) if self.replay_keep else 0


class RowConstraint(Protocol):
    """Where one sequence stands in its grammar."""

    @property
    def mask_words(self) -> int:
        """int32 words of a mask row: bit `i` of word `w` allows token `32 w + i`."""
        ...

    def fill(self, rows: MaskRows, drafts: Sequence[int]) -> None:
        """Write the masks of the next token and of the token behind each draft, and stay.

        rows: int32 [1 + len(drafts), mask_words], all bits set. Rows behind a draft that the
            grammar forbids, or behind its end, are left alone: nothing is emitted from them.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens `[start, start + len(token_ids))` of one prompt.

    snapshots: (position, state slot) pairs with `start < position <= end`, `position % 128 == 0`:
    after the
        chunk the slot holds the state exactly as if only `position` tokens had been fed.
    sample: True on the prompt's last chunk: the first output token is sampled from the last row.
    lookback: the up to `caps.lookback` tokens before `start`, oldest first; -1 where the token is a
        picture's.
    pictures: those with a token in the chunk, with their pixels.
    valid_start: no window key exists before it: its state was lost, and tokens from it on run
        again.
    entries_from: what blocks hold of tokens before it was loaded and must stay as it is.
    """

    token_ids: IntArray
    start: int
    lookback: tuple[int, ...]
    block_table: Sequence[int]
    state_slot: int
    sampling: SamplingParams
    sample: bool
    snapshots: tuple[tuple[int, int], ...] = ()
    prompt_len: int = 0
    """Tokens of the whole prompt; read where replay is bounded."""
    prompt: Sequence[int] = ()
    """The whole prompt; needed on the sampling chunk when penalties are set."""
    constraint: RowConstraint | None = None
    """On the sampling chunk of a constrained request."""
    pictures: tuple[Picture, ...] = ()
    prompt_logprobs: int | None = None
    """Wanted of the chunk's tokens and of the one behind it; `following` are those tokens."""
    following: Sequence[int] = ()
    """[len(token_ids)] the prompt token behind each row, -1 behind the last of the prompt."""
    resumed: int = 0
    """The last so many tokens of the prompt are output, for penalties and minimum length."""
    valid_start: int = 0
    entries_from: int = 0


@dataclass(slots=True)  # not frozen: hundreds are made a step, and that takes three times as long
class DecodeRow:
    """One running sequence of a decode step.

    history: all committed tokens (prompt + output); `history[-1]` is the anchor, at position
        `len(history) - 1 == N`. prompt_len: how many of them are the prompt.
    block_table: covers positions up to `N + max_draft`.
    max_draft: 0 .. caps.nextn, cut by the scheduler so that neither max_tokens nor the model length
    is passed.
    """

    history: Sequence[int]
    prompt_len: int
    block_table: Sequence[int]
    state_slot: int
    sampling: SamplingParams
    max_draft: int
    constraint: RowConstraint | None = None
    pictures: tuple[Picture, ...] = ()
    """Those of the prompt; no pixels needed."""


@dataclass(slots=True)  # not frozen, as `DecodeRow`
class StepOutput:
    """What one step emitted for one sequence, in order: accepted drafts, then one sampled token.

    `len(tokens) == n_accepted + 1`. KV of exactly those positions that precede the last token is
    valid afterwards (`N += len(tokens)`); rejected rows need no cleanup.
    """

    tokens: tuple[int, ...]
    n_drafted: int = 0
    n_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = field(default=())
    failed: bool = False
    """No finite or allowed token existed for the next position: the request must end with `error`.
    `tokens` then holds only what was accepted before it."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the `following` of a chunk that asked; such an output may hold no token."""


class StepRunner(Protocol):
    """A model with its device pools. Calls block until the step is done; not thread-safe."""

    @property
    def caps(self) -> Caps: ...

    @property
    def layout(self) -> CacheLayout: ...

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[StepOutput | None]:
        """Run chunks of different prompts as one batch; an output where `sample` was set."""
        ...

    def decode(self, rows: Sequence[DecodeRow]) -> list[StepOutput]:
        """Draft, verify and emit one step for every row."""
        ...

    def mixed(
        self, chunks: Sequence[PrefillChunk], rows: Sequence[DecodeRow]
    ) -> tuple[list[StepOutput | None], list[StepOutput]]:
        """Both at once, of different sequences: what `prefill` and `decode` return."""
        ...

    def block_bytes(self, block_id: int) -> memoryview:
        """Writable view of one block's bytes; valid until the runner is closed."""
        ...

    def state_bytes(self, slot: int) -> memoryview:
        """Writable view of one state slot's bytes."""
        ...

    def clear_state(self, slot: int) -> None:
        """Make a slot that of a sequence of length 0."""
        ...
