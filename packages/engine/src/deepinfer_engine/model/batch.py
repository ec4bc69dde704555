"""One forward pass described as tensors: which rows, of which sequences, at which positions,
reading what.

Built once a step and shared by all layers. "Prefill" and "decode" are not different here: a
sequence contributes `q >= 1` new tokens after `start` resident ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.backend.base import IntArray
from deepinfer_engine.model.config import BLOCK_TOKENS, TextConfig
from deepinfer_engine.model.image_rows import ImageRows, Images, without_first


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The new tokens of one sequence in a forward pass.

    replay_from: consumer layers see and keep no window key before this position (bounded replay).
    valid_start: no layer sees a window key before it: that part of the window was lost.
    entries_from: compressed entries that close before it are in the cache already and stay as they
        are.
    """

    token_ids: IntArray
    start: int
    lookback: tuple[int, ...]
    block_table: Sequence[int]
    state_slot: int
    snapshots: tuple[tuple[int, int], ...] = ()
    replay_from: int = 0
    valid_start: int = 0
    entries_from: int = 0
    images: Images = ()


class Batch:
    """Index tensors of one forward pass over `S` sequences and `n` rows in total (int64 unless
    said)."""

    def __init__(
        self, config: TextConfig, sequences: Sequence[SequenceRows], *, consumers: bool = False
    ) -> None:
        lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
        starts = np.array([s.start for s in sequences], dtype=np.int64)
        self.size = len(sequences)
        self.rows = int(lengths.sum())
        self.max_query = int(lengths.max())
        self.max_end = int((starts + lengths).max())
        self._config = config
        self._sequences = sequences
        first = np.cumsum(lengths) - lengths
        of_row = np.repeat(np.arange(self.size), lengths)
        offset = np.arange(self.rows) - first[of_row]
        self.ids = torch.from_numpy(
            np.concatenate([s.token_ids for s in sequences]).astype(np.int64)
        )
        self.sequence = torch.from_numpy(of_row)
        """[n] sequence of each row."""
        self.offset = torch.from_numpy(offset)
        """[n] position within the sequence's new tokens."""
        self.start = torch.from_numpy(starts)
        self.first_row = torch.from_numpy(first)
        self.length = torch.from_numpy(lengths)
        self.position = self.start[self.sequence] + self.offset
        """[n] absolute position of each row."""
        self.slot = torch.tensor([s.state_slot for s in sequences], dtype=torch.int64)
        widest = max(len(s.block_table) for s in sequences)
        table = np.zeros((self.size, max(widest, 1)), dtype=np.int64)
        for i, s in enumerate(sequences):
            table[i, : len(s.block_table)] = s.block_table
        self.block_table = torch.from_numpy(table)
        floors = [max(s.valid_start, s.replay_from if consumers else 0) for s in sequences]
        self.consumers_only = consumers
        self.floor = torch.tensor(floors) if any(floors) else None
        """[S] first position whose window key exists, or None: all exist."""
        self.images = ImageRows.build([s.images for s in sequences], first.tolist(), self.rows)

    @property
    def image_rows(self) -> Tensor | None:
        """bool [n], rows that are tokens of pictures; None when no row is."""
        return None if self.images is None else self.images.mask

    def consumers(self, *, compact: bool) -> tuple[Batch, Tensor | None]:
        """What consumer layers run: (batch, its rows [m] among this one's, or None for all).

        With `compact`, rows before `replay_from` are dropped, but for the last of each sequence.
        """
        if not any(s.replay_from for s in self._sequences):
            return self, None
        if not compact:
            return Batch(self._config, self._sequences, consumers=True), None
        kept: list[SequenceRows] = []
        rows: list[Tensor] = []
        for s, first in zip(self._sequences, self.first_row.tolist(), strict=True):
            length = len(s.token_ids)
            clip = min(max(s.replay_from - s.start, 0), length - 1)
            kept.append(
                replace(
                    s,
                    token_ids=s.token_ids[clip:],
                    start=s.start + clip,
                    images=without_first(s.images, clip),
                )
            )
            rows.append(torch.arange(first + clip, first + length))
        return Batch(self._config, kept, consumers=True), torch.cat(rows)

    @cached_property
    def window(self) -> Window:
        """Sliding-window reads, the same for every backbone layer."""
        return Window.build(self, self._config)

    @cached_property
    def ring_writes(self) -> tuple[Tensor, Tensor]:
        """(row indices [m], ring slots [m]) of everything a layer writes into rings, snapshots
        included.

        Only the last `ring_slots` rows up to the end (or up to a snapshot's position) are written:
        earlier rows would land on the same slots.
        """
        size = self._config.ring_slots
        keep = self.offset >= (self.length[self.sequence] - size)
        if self.floor is not None:
            keep &= self.position >= self.floor[self.sequence]
        rows = torch.nonzero(keep)[:, 0]
        slots = self.slot[self.sequence[rows]] * size + self.position[rows] % size
        parts_rows, parts_slots = [rows], [slots]
        for i, sequence in enumerate(self._sequences):
            for position, slot in sequence.snapshots:
                floor = 0 if self.floor is None else int(self.floor[i])
                low = max(sequence.start, position - size, floor)
                if low >= position:
                    continue
                taken = torch.arange(low, position) - sequence.start + self.first_row[i]
                parts_rows.append(taken)
                parts_slots.append(slot * size + torch.arange(low, position) % size)
        return torch.cat(parts_rows), torch.cat(parts_slots)

    @property
    def snapshot_pairs(self) -> list[tuple[int, int]]:
        """(source slot, destination slot): what must be copied before the pass, so that older rows
        are there."""
        return [(s.state_slot, slot) for s in self._sequences for _, slot in s.snapshots]

    def visible(self, ratio: int) -> Tensor:
        """[n] number of compressed entries a row may see."""
        return (self.position + 1) // ratio

    def max_entries(self, ratio: int) -> int:
        """Most entries any sequence of the batch has after this pass."""
        return self.max_end // ratio

    def entry_slots(self, sequence: Tensor, entry: Tensor, ratio: int) -> Tensor:
        """Pool rows of entries (any equal shapes); entry -1 gives -1."""
        per_block = BLOCK_TOKENS // ratio
        safe = entry.clamp(min=0)
        block = self.block_table[sequence, safe // per_block]
        return torch.where(entry >= 0, block * per_block + safe % per_block, -1)

    def closing(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(rows [m] that complete a group of `ratio` tokens, their entry ids [m])."""
        closes = (self.position + 1) % ratio == 0
        if any(s.entries_from for s in self._sequences):
            exact = torch.tensor([s.entries_from for s in self._sequences])
            closes &= self.position >= exact[self.sequence]
        rows = torch.nonzero(closes)[:, 0]
        return rows, self.position[rows] // ratio

    def grams(self, lookback: int) -> Tensor:
        """[n, lookback+1] token ids: column i is the token i positions back, -1 before the
        sequence's start and for a picture's tokens."""
        ids = self.ids if self.images is None else self.ids.masked_fill(self.images.mask, -1)
        padded = np.full((self.size, lookback), -1, dtype=np.int64)
        for i, s in enumerate(self._sequences):
            if s.lookback and lookback:
                tail = s.lookback[-lookback:]
                padded[i, lookback - len(tail) :] = tail
        history = torch.from_numpy(padded)
        columns = [ids]
        for back in range(1, lookback + 1):
            inside = self.offset >= back
            here = ids[(torch.arange(self.rows) - back).clamp(min=0)]
            column = (lookback - back + self.offset).clamp(max=lookback - 1)
            columns.append(torch.where(inside, here, history[self.sequence, column]))
        return torch.stack(columns, dim=1)


@dataclass(frozen=True, slots=True)
class Window:
    """How sliding-window keys are gathered: `width` history rows a sequence, then the new rows."""

    width: int
    history_slots: Tensor
    """[S, width] ring slots of positions start-width .. start-1; -1 before the sequence began."""
    index: Tensor
    """[n, window] into cat(history [S*width], new rows [n]); -1 = no such key."""

    @staticmethod
    def build(batch: Batch, config: TextConfig) -> Window:
        W, ring = config.sliding_window, config.ring_slots
        width = min(W - 1, int(batch.start.max()))
        positions = batch.start[:, None] - width + torch.arange(width)
        slots = batch.slot[:, None] * ring + positions % ring
        floor = 0 if batch.floor is None else batch.floor[:, None]
        history_slots = torch.where(positions >= floor, slots, -1)
        back = torch.arange(min(W, batch.max_end) - 1, -1, -1)
        key = batch.position[:, None] - back
        offset = batch.offset[:, None] - back
        in_rows = batch.size * width + batch.first_row[batch.sequence][:, None] + offset
        in_history = batch.sequence[:, None] * width + width + offset
        index = torch.where(offset >= 0, in_rows, in_history)
        lowest = 0 if batch.floor is None else batch.floor[batch.sequence][:, None]
        return Window(width, history_slots, torch.where(key >= lowest, index, -1))
