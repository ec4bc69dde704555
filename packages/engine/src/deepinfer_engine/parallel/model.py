"""A group of processes as one `LoadedModel`: rows go out, logits come back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.core.runner import CacheLayout, IntArray, PrefillChunk
from deepinfer_engine.model.family import DraftSource, FamilyConfig, LoadedModel
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.parallel import network
from deepinfer_engine.parallel.channel import Channel
from deepinfer_engine.parallel.messages import rows_body
from deepinfer_engine.parallel.seat import Seat


class GroupModel:
    """Implements `LoadedModel`. All but `forward` is the model of this process."""

    def __init__(self, model: LoadedModel, seat: Seat, others: Sequence[Channel]) -> None:
        """others: channels to ranks 1, 2, ..."""
        self._model = model
        self._seat = seat
        self._others = others

    @property
    def config(self) -> FamilyConfig:
        return self._model.config

    @property
    def layout(self) -> CacheLayout:
        return self._model.layout

    @property
    def lookback(self) -> int:
        return self._model.lookback

    @property
    def window(self) -> int:
        return self._model.window

    @property
    def window_rows(self) -> int:
        return self._model.window_rows

    @property
    def window_layers(self) -> int:
        return self._model.window_layers

    @property
    def replay_keep(self) -> int:
        return self._model.replay_keep

    @property
    def blocks(self) -> Tensor:
        return self._model.blocks

    @property
    def states(self) -> Tensor:
        return self._model.states

    @property
    def drafts(self) -> DraftSource | None:
        """Runs here alone, for all sequences: the draft layers' experts are whole everywhere."""
        return self._model.drafts

    def rows_of(self, chunk: PrefillChunk) -> SequenceRows:
        return self._model.rows_of(chunk)

    def dense_weights(self) -> list[Tensor]:
        """Of this process."""
        return self._model.dense_weights()

    def forward(self, rows: Sequence[SequenceRows], logit_rows: Tensor | None) -> Tensor:
        """See `LoadedModel.forward`. Raises EngineLost where a process was lost: the cache of the
        sequences is then in doubt, and the group of no more use."""
        whole = logit_rows is not None or not any(r.replay_from for r in rows)
        assert whole, "under bounded replay the rows that are kept must be named"
        shares = divided(rows, self._seat.size)
        lengths = np.array([len(r.token_ids) for r in rows], dtype=np.int64)
        first = np.cumsum(lengths) - lengths
        wanted = np.arange(lengths.sum()) if logit_rows is None else logit_rows.numpy()
        parts = [part_of(share, first, lengths, wanted) for share in shares]
        for channel, share, (local, _) in zip(self._others, shares[1:], parts[1:], strict=True):
            body = {"rows": rows_body([rows[i] for i in share]), "wanted": local.tolist()}
            channel.send(body)
        local, places = parts[0]
        own = self._model.forward([rows[i] for i in shares[0]], torch.from_numpy(local))
        out = own.new_empty((len(wanted), own.shape[1]))
        out[torch.from_numpy(places)] = own
        for rank, (_, places) in enumerate(parts[1:], start=1):
            if shares[rank]:
                got = own.new_empty(answer_shape(len(places), own.shape[1]))
                network.receive(got, rank)
                if len(places):
                    out[torch.from_numpy(places)] = got
        self._seat.ended()
        return out


def divided(rows: Sequence[SequenceRows], size: int) -> list[list[int]]:
    """Which sequences each process runs: in turn to the one with the fewest tokens so far. Those
    with pictures run here, where their pixels are."""
    shares: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for i, row in enumerate(rows):
        rank = 0 if row.images else tokens.index(min(tokens))
        shares[rank].append(i)
        tokens[rank] += len(row.token_ids)
    return shares


def answer_shape(rows: int, vocabulary: int) -> tuple[int, int]:
    """Of what a process sends when its pass is over: logits, or where none are wanted a single
    number. Nobody may read the caches before all have written them."""
    return (rows, vocabulary) if rows else (1, 1)


def part_of(
    share: Sequence[int], first: IntArray, lengths: IntArray, wanted: IntArray
) -> tuple[IntArray, IntArray]:
    """(rows wanted of a share, counted among its own; their places among all that are wanted)."""
    of_row = np.full(int(lengths.sum()), -1, dtype=np.int64)
    at = 0
    for i in share:
        of_row[first[i] : first[i] + lengths[i]] = at + np.arange(lengths[i])
        at += int(lengths[i])
    local = of_row[wanted]
    places = np.flatnonzero(local >= 0)
    return local[places], places
