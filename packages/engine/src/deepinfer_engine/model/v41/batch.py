"""One forward pass described as tensors: which rows, of which sequences, at which positions,
reading what.

The arithmetic is done in numpy, whose calls on arrays of a few numbers cost a fraction of torch's;
the model gets tensors over the same memory.

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

from deepinfer_engine.core.runner import BLOCK_TOKENS, IntArray
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.model.v41.config import TextConfig
from deepinfer_engine.model.vision.image_rows import ImageRows, without_first


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
        widest = max(len(s.block_table) for s in sequences)
        table = np.zeros((self.size, max(widest, 1)), dtype=np.int64)
        for i, s in enumerate(sequences):
            table[i, : len(s.block_table)] = s.block_table
        floors = [max(s.valid_start, s.replay_from if consumers else 0) for s in sequences]
        self.consumers_only = consumers
        self._starts, self._lengths, self._first, self._table = starts, lengths, first, table
        self._of_row, self._offset, self._position = of_row, offset, starts[of_row] + offset
        self._slot = np.array([s.state_slot for s in sequences], dtype=np.int64)
        self._floor = np.array(floors, dtype=np.int64) if any(floors) else None
        """[S] first position whose window key exists, or None: all exist."""
        self._ids = np.concatenate([s.token_ids for s in sequences]).astype(np.int64)
        self._per_ratio: dict[int, Entries] = {}
        self._all_entries: dict[int, AllEntries] = {}
        self.ids = torch.from_numpy(self._ids)
        self.first_row = torch.from_numpy(first)
        self.first = torch.from_numpy(np.append(first, self.rows))
        """[S + 1] first row of each sequence, and the number of rows."""
        self.table = torch.from_numpy(table)
        """[S, blocks] the blocks of each sequence in order."""
        self.position = torch.from_numpy(self._position)
        """[n] absolute position of each row."""
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
        """Sliding-window reads through a gather, the same for every backbone layer."""
        W, ring = self._config.sliding_window, self._config.ring_slots
        width = min(W - 1, int(self._starts.max()))
        positions = self._starts[:, None] - width + np.arange(width)
        slots = self._slot[:, None] * ring + positions % ring
        floor = 0 if self._floor is None else self._floor[:, None]
        history_slots = np.where(positions >= floor, slots, -1)
        back = np.arange(min(W, self.max_end) - 1, -1, -1)
        offset = self._offset[:, None] - back
        in_rows = self.size * width + self._first[self._of_row][:, None] + offset
        in_history = self._of_row[:, None] * width + width + offset
        index = np.where(offset >= 0, in_rows, in_history)
        key = self._position[:, None] - back
        index = np.where(key >= self._lowest(), index, -1)
        return Window(width, torch.from_numpy(history_slots), torch.from_numpy(index))

    @property
    def writes_first(self) -> bool:
        """Whether a layer may write its keys into the ring before its rows read their windows
        there: no sequence brings so many rows that they would land on keys still needed."""
        return self.max_query <= self._config.ring_slots - self._config.sliding_window + 1

    @cached_property
    def ring_reads(self) -> Tensor:
        """[n, window] ring slots of the window keys of each row, itself included; -1 = no such
        key. Only where `writes_first`."""
        W, ring = self._config.sliding_window, self._config.ring_slots
        key = self._position[:, None] - np.arange(min(W, self.max_end) - 1, -1, -1)
        slots = self._slot[self._of_row][:, None] * ring + key % ring
        return torch.from_numpy(np.where(key >= self._lowest(), slots, -1))

    def _lowest(self) -> IntArray | int:
        """First position whose window key exists, [n, 1] or for all."""
        return 0 if self._floor is None else self._floor[self._of_row][:, None]

    @cached_property
    def ring_writes(self) -> tuple[Tensor, Tensor]:
        """(row indices [m], ring slots [m]) of everything a layer writes into rings, snapshots
        included.

        Only the last `ring_slots` rows up to the end (or up to a snapshot's position) are written:
        earlier rows would land on the same slots.
        """
        size = self._config.ring_slots
        keep = self._offset >= self._lengths[self._of_row] - size
        if self._floor is not None:
            keep &= self._position >= self._floor[self._of_row]
        rows = np.flatnonzero(keep)
        slots = self._slot[self._of_row[rows]] * size + self._position[rows] % size
        parts_rows, parts_slots = [rows], [slots]
        for i, sequence in enumerate(self._sequences):
            for position, slot in sequence.snapshots:
                floor = 0 if self._floor is None else int(self._floor[i])
                low = max(sequence.start, position - size, floor)
                if low >= position:
                    continue
                parts_rows.append(np.arange(low, position) - sequence.start + self._first[i])
                parts_slots.append(slot * size + np.arange(low, position) % size)
        return (
            torch.from_numpy(np.concatenate(parts_rows)),
            torch.from_numpy(np.concatenate(parts_slots)),
        )

    @property
    def snapshot_pairs(self) -> list[tuple[int, int]]:
        """(source slot, destination slot): what must be copied before the pass, so that older rows
        are there."""
        return [(s.state_slot, slot) for s in self._sequences for _, slot in s.snapshots]

    def entries(self, ratio: int) -> Entries:
        """What layers of one compress ratio write and may see."""
        found = self._per_ratio.get(ratio)
        if found is None:
            found = self._per_ratio[ratio] = self._entries(ratio)
        return found

    def _entries(self, ratio: int) -> Entries:
        closes = (self._position + 1) % ratio == 0
        exact = [s.entries_from for s in self._sequences]
        if any(exact):
            closes &= self._position >= np.array(exact)[self._of_row]
        rows = np.flatnonzero(closes)
        entry = self._position[rows] // ratio
        return Entries(
            count=self.max_end // ratio,
            visible=torch.from_numpy((self._position + 1) // ratio),
            rows=torch.from_numpy(rows),
            entry=torch.from_numpy(entry),
            slots=torch.from_numpy(self._slots_of(self._of_row[rows], entry, ratio)),
        )

    def entry_slots(self, selection: Tensor, ratio: int) -> Tensor:
        """Pool rows of the entries each row chose [n, k]; entry -1 gives -1."""
        rows = self._of_row[:, None]
        return torch.from_numpy(self._slots_of(rows, selection.numpy(), ratio))

    def all_entries(self, ratio: int) -> AllEntries:
        """The entries of every sequence, one sequence behind the other."""
        found = self._all_entries.get(ratio)
        if found is None:
            own = (self._starts + self._lengths) // ratio
            first = np.cumsum(own) - own
            sequence = np.repeat(np.arange(self.size), own)
            entry = np.arange(int(own.sum())) - first[sequence]
            found = self._all_entries[ratio] = AllEntries(
                torch.from_numpy(self._slots_of(sequence, entry, ratio)),
                torch.from_numpy(first[self._of_row]),
            )
        return found

    def _slots_of(self, sequence: IntArray, entry: IntArray, ratio: int) -> IntArray:
        per_block = BLOCK_TOKENS // ratio
        safe = np.maximum(entry, 0)
        slots = self._table[sequence, safe // per_block] * per_block + safe % per_block
        return np.where(entry >= 0, slots, -1)

    def pairing(self, ring: int) -> Pairing:
        """How a compressor of ratio 2 with that many state rows finds, and keeps, its pairs."""
        rows = self.entries(2).rows.numpy()
        keep = np.flatnonzero(self._offset >= self._lengths[self._of_row] - ring)
        arrays = (
            np.maximum(rows - 1, 0),
            (self._offset[rows] >= 1)[:, None],
            self._slot[self._of_row[rows]],
            (self._starts[self._of_row[rows]] - 1) % ring,
            keep,
            self._slot[self._of_row[keep]],
            self._position[keep] % ring,
        )
        return Pairing(*(torch.from_numpy(array) for array in arrays))

    def grams(self, lookback: int) -> Tensor:
        """[n, lookback+1] token ids: column i is the token i positions back, -1 before the
        sequence's start and for a picture's tokens."""
        ids = self._ids
        if self.images is not None:
            ids = np.where(self.images.mask.numpy(), -1, ids)
        padded = np.full((self.size, lookback), -1, dtype=np.int64)
        for i, s in enumerate(self._sequences):
            if s.lookback and lookback:
                tail = s.lookback[-lookback:]
                padded[i, lookback - len(tail) :] = tail
        columns = [ids]
        for back in range(1, lookback + 1):
            here = ids[np.maximum(np.arange(self.rows) - back, 0)]
            column = np.minimum(lookback - back + self._offset, lookback - 1)
            columns.append(np.where(self._offset >= back, here, padded[self._of_row, column]))
        return torch.from_numpy(np.stack(columns, axis=1))


@dataclass(frozen=True, slots=True)
class Window:
    """How sliding-window keys are gathered: `width` history rows a sequence, then the new rows."""

    width: int
    history_slots: Tensor
    """[S, width] ring slots of positions start-width .. start-1; -1 before the sequence began."""
    index: Tensor
    """[n, window] into cat(history [S*width], new rows [n]); -1 = no such key."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries of one ratio."""

    count: int
    """Most entries any sequence of the batch has after this pass."""
    visible: Tensor
    """[n] entries a row may see."""
    rows: Tensor
    """[m] rows that complete a group and write its entry."""
    entry: Tensor
    """[m] the ids of those entries."""
    slots: Tensor
    """[m] their pool rows."""


@dataclass(frozen=True, slots=True)
class AllEntries:
    """The compressed entries of one ratio of all sequences of a batch, nothing padded."""

    slots: Tensor
    """[m] pool rows."""
    first: Tensor
    """[n] place of the first entry of each row's sequence."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both halves of each group that closes, and what to keep for later groups."""

    first: Tensor
    """[m] row of the first half, where it is in this batch."""
    inside: Tensor
    """bool [m, 1] whether it is."""
    slot: Tensor
    """[m] state slot of the sequence."""
    before: Tensor
    """[m] state row of the first half where it is not."""
    keep: Tensor
    """[k] rows whose gate and value are remembered."""
    keep_slot: Tensor
    """[k] into this state slot."""
    keep_at: Tensor
    """[k] and this row of it."""
