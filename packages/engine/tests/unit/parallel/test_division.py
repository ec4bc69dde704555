"""How a step is divided among processes, and the messages that carry it. One process."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.errors import EngineLost
from deepinfer_engine.model.sequence_rows import SequenceRows
from deepinfer_engine.parallel.channel import MOST_BYTES, Channel
from deepinfer_engine.parallel.messages import Balancing, Setup, read_rows, rows_body
from deepinfer_engine.parallel.model import divided, part_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


def rows_of(lengths: list[int]) -> list[SequenceRows]:
    return [SequenceRows(np.arange(n), 0, (), [1], i + 1) for i, n in enumerate(lengths)]


@given(lengths=LENGTHS, size=st.integers(1, 5), data=st.data())
def test_every_row_is_run_once_and_comes_back_to_its_place(lengths, size, data) -> None:
    total = sum(lengths)
    wanted = np.array(
        data.draw(st.lists(st.integers(0, total - 1), max_size=total, unique=True)), dtype=np.int64
    )
    shares = divided(rows_of(lengths), size)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    counts = np.array(lengths)
    first = np.cumsum(counts) - counts
    back = np.full(len(wanted), -1)
    for share in shares:
        local, places = part_of(share, first, counts, wanted)
        # What a process computes for row r of its own is the number of that row in the batch.
        own = np.concatenate([first[i] + np.arange(counts[i]) for i in share] or [np.zeros(0)])
        assert (back[places] == -1).all()
        back[places] = own[local]
    assert (back == wanted).all()


@given(lengths=LENGTHS, size=st.integers(1, 5))
def test_no_process_has_more_than_the_mean_and_a_sequence(lengths, size) -> None:
    loads = [sum(lengths[i] for i in share) for share in divided(rows_of(lengths), size)]
    assert max(loads) <= sum(lengths) / size + max(lengths)


def test_pictures_stay_where_their_pixels_are() -> None:
    rows = rows_of([4, 4, 4])
    embedded = SequenceRows(np.arange(4), 0, (), [1], 9, images=((0, torch.zeros(2, 3)),))
    assert divided([rows[0], embedded, rows[1]], 2)[0] == [0, 1]


@given(
    rows=st.lists(
        st.builds(
            SequenceRows,
            token_ids=st.lists(st.integers(0, 2**40), min_size=1, max_size=5).map(np.array),
            start=st.integers(0, 2**40),
            lookback=st.lists(st.integers(-1, 99), max_size=3).map(tuple),
            block_table=st.lists(st.integers(0, 2**31), max_size=5),
            state_slot=st.integers(0, 99),
            snapshots=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 9)), max_size=2).map(
                tuple
            ),
            replay_from=st.integers(0, 99),
            valid_start=st.integers(0, 99),
            entries_from=st.integers(0, 99),
        ),
        max_size=4,
    )
)
def test_rows_survive_their_message(rows) -> None:
    ends = [os.pipe(), os.pipe()]
    near, far = Channel(ends[0][0], ends[1][1]), Channel(ends[1][0], ends[0][1])
    near.send({"rows": rows_body(rows)})
    body = far.receive()
    near.close()
    assert far.receive() is None
    far.close()
    for got, row in zip(read_rows(body["rows"]), rows, strict=True):
        assert got.token_ids.tolist() == row.token_ids.tolist()
        for name in SequenceRows.__slots__[1:]:
            assert getattr(got, name) == getattr(row, name)


def test_a_setup_survives_its_message_and_is_checked() -> None:
    setup = Setup(
        1, 2, "m", "float64", "none", "off", None, 8, 4, 1, "s", 1.0, {"blocks": 3}, Balancing(7, 2)
    )
    assert Setup.read(setup.body()) == setup
    with pytest.raises(ValueError, match="num_slots"):
        Setup.read({**setup.body(), "num_slots": "many"})


def channel_with(data: bytes) -> Channel:
    read, write = os.pipe()
    os.write(write, data)
    os.close(write)
    return Channel(read, os.open(os.devnull, os.O_WRONLY))


def test_a_damaged_message_is_an_error_and_a_cut_one_the_end() -> None:
    with pytest.raises(EngineLost, match="damaged"):
        channel_with(struct.pack("<Q", MOST_BYTES + 1)).receive()
    with pytest.raises(EngineLost, match="no map"):
        channel_with(struct.pack("<Q", 1) + b"\x01").receive()
    assert channel_with(struct.pack("<Q", 100) + b"\x81").receive() is None
    assert channel_with(b"\x01").receive() is None


def test_nobody_at_the_other_end_is_a_lost_group() -> None:
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(EngineLost, match="is gone"):
        Channel(os.open(os.devnull, os.O_RDONLY), write).send({"rows": []})
