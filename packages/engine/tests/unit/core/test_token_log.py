"""Counts of a growing list are those of the list."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deepinfer_engine.core.token_log import TokenLog


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8),
    st.data(),
)
def test_counts_follow_what_is_added(prompt, steps, data):
    log = TokenLog(tuple(prompt))
    start = data.draw(st.integers(0, len(prompt)))
    for step in steps:
        log.extend(step)
        if data.draw(st.booleans()):
            assert log.counts(start) == Counter(log[start:])
            assert log.before(start) == sorted(set(log[:start]))


def test_another_start_counts_anew():
    log = TokenLog((1, 2, 3, 2))
    assert log.counts(2) == {3: 1, 2: 1}
    assert log.before(2) == [1, 2]
    assert log.counts(1) == {2: 2, 3: 1}
    assert log.before(1) == [1]
    assert log.counts(3) == {2: 1}
