"""A list of work shared with helping threads: each item once, nothing still running afterwards."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer_kvtier.log.reading import ALONE, taken, with_helpers


class Contested:
    """A turn that somebody more urgent wants."""

    contested = True

    def __init__(self):
        self.passed = 0

    def give_way(self):
        self.passed += 1


def test_the_calling_thread_lets_urgent_loads_pass_and_a_helper_leaves():
    urgency, left = Contested(), deque(range(3))
    assert list(taken(left, urgency, helping=True)) == []
    assert urgency.passed == 0
    assert list(taken(left, urgency, helping=False)) == [0, 1, 2]
    assert urgency.passed == 3


def test_each_item_is_taken_once_by_whoever_comes_first():
    left, together = deque(range(1_000)), threading.Barrier(3)

    def work(helping):
        together.wait(20)
        return list(taken(left, ALONE, helping=helping))

    with ThreadPoolExecutor(2) as pool:
        shares = with_helpers(work, pool, 2)
    assert len(shares) == 3
    assert sorted(item for share in shares for item in share) == list(range(1_000))


def test_nothing_runs_any_more_when_the_calling_thread_fails():
    begun, ended = threading.Event(), threading.Event()

    def work(helping):
        if helping:
            begun.set()
            ended.wait(0.2)
            ended.set()
        else:
            begun.wait(20)
            raise OSError("broken")

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(OSError, match="broken"):
            with_helpers(work, pool, 3)
        assert ended.is_set()
