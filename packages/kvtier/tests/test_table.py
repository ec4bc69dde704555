from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvtier.log.index import ROW, EntryTable

# A few keys only, so that inserts meet each other; low bits equal, so that probes run long.
KEYS = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1))
OPERATION = st.one_of(
    st.tuples(st.just("insert"), st.lists(st.tuples(KEYS, st.integers(0, 4)), max_size=12)),
    st.tuples(st.just("remove"), st.lists(KEYS, max_size=4)),
    st.tuples(st.just("segment"), st.integers(0, 4)),
)


def rows_of(items) -> np.ndarray:
    rows = np.zeros(len(items), dtype=ROW)
    for row, ((lo, hi, kind, shard), segment) in zip(rows, items, strict=True):
        row["key_lo"], row["key_hi"] = lo << 32, hi
        row["kind"], row["shard"], row["segment"] = kind, shard, segment
    return rows


def find(table: EntryTable, key) -> int:
    lo, hi, kind, shard = key
    columns = np.array([lo << 32], "<u8"), np.array([hi], "<u8")
    return int(table.find(*columns, kind, shard)[0])


@given(st.lists(OPERATION, max_size=25))
def test_the_table_agrees_with_a_dictionary(operations):
    table, oracle = EntryTable(capacity=2), {}
    for name, argument in operations:
        if name == "insert":
            added = table.insert(rows_of(argument))
            for (key, segment), was_added in zip(argument, added, strict=True):
                assert was_added == (key not in oracle)
                oracle.setdefault(key, segment)
        elif name == "remove":
            numbers = [find(table, key) for key in argument if key in oracle]
            gone = table.remove(np.array(numbers, dtype=np.int64))
            assert len(gone) == len({key for key in argument if key in oracle})
            for key in argument:
                oracle.pop(key, None)
        else:
            numbers = table.numbers_in_segment(argument)
            assert len(numbers) == sum(segment == argument for segment in oracle.values())
            table.remove(numbers)
            oracle = {key: segment for key, segment in oracle.items() if segment != argument}
        table.audit()
        assert len(table) == len(oracle)
        for key, segment in oracle.items():
            assert table.take(np.array([find(table, key)]))["segment"][0] == segment


@pytest.mark.slow
def test_a_million_records_take_less_than_64_bytes_each():
    rng = np.random.default_rng(0)
    table = EntryTable()
    for _ in range(20):
        rows = np.zeros(50_000, dtype=ROW)
        rows["key_lo"] = rng.integers(0, 2**64, 50_000, dtype=np.uint64)
        rows["key_hi"] = rng.integers(0, 2**64, 50_000, dtype=np.uint64)
        assert table.insert(rows).all()
    assert len(table) == 1_000_000
    assert table.nbytes < 64_000_000
    assert (table.find(rows["key_lo"], rows["key_hi"], 0, 0) >= 0).all()


def test_touch_raises_the_last_use_and_never_lowers_it():
    table = EntryTable()
    table.insert(rows_of([((1, 1, 0, 0), 0)]))
    number = np.array([find(table, (1, 1, 0, 0))])
    table.touch(number, 50)
    table.touch(number, 20)
    assert table.take(number)["seen_s"][0] == 50
