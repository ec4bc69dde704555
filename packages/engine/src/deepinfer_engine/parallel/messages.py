"""What the leader tells the members: how to load, and the rows of each forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from deepinfer_engine.model.sequence_rows import SequenceRows


@dataclass(frozen=True, slots=True)
class Balancing:
    """When experts move. `every`: steps between two plans, 0 = never; `redundant`: slots beside one
    for each expert, rounded up so that all processes hold equally many."""

    every: int = 10_000
    redundant: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a member needs before it can load the model.

    store: path of the file over which gloo's processes find each other, in a folder of the owner's
    own. pools: descriptors by name, inherited.
    """

    rank: int
    size: int
    model: str
    dtype: str
    cache_quant: str
    replay: str
    keep: int | None
    num_blocks: int | None
    num_slots: int
    threads: int
    store: str
    deadline_s: float
    pools: dict[str, int]
    balancing: Balancing
    batch_invariant: bool = False

    def body(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def read(body: dict[str, Any]) -> Setup:
        """Raises pydantic's ValidationError."""
        return TypeAdapter(Setup).validate_python(body)


def rows_body(rows: Sequence[SequenceRows]) -> list[list[Any]]:
    """Rows without pictures, as values of msgpack."""
    return [
        [
            np.asarray(r.token_ids, dtype=np.int64).tobytes(),
            r.start,
            list(r.lookback),
            np.asarray(r.block_table, dtype=np.int64).tobytes(),
            r.state_slot,
            [list(pair) for pair in r.snapshots],
            r.replay_from,
            r.valid_start,
            r.entries_from,
        ]
        for r in rows
    ]


def read_rows(body: Sequence[Sequence[Any]]) -> list[SequenceRows]:
    """The inverse of `rows_body`."""
    return [_read_row(*values) for values in body]


def _read_row(
    tokens: bytes,
    start: int,
    lookback: Sequence[int],
    table: bytes,
    slot: int,
    snapshots: Sequence[tuple[int, int]],
    replay_from: int,
    valid_start: int,
    entries_from: int,
) -> SequenceRows:
    return SequenceRows(
        np.frombuffer(tokens, dtype=np.int64),
        start,
        tuple(lookback),
        np.frombuffer(table, dtype=np.int64).tolist(),
        slot,
        tuple((position, spare) for position, spare in snapshots),
        replay_from,
        valid_start,
        entries_from,
    )
