"""What the router has given to its workers, over very many requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from deepinfer_engine.pd.wire import Xid
from deepinfer_engine.router.changes import Changes
from deepinfer_engine.router.choose import BOUND, Candidate, by_room, by_ttft
from deepinfer_engine.router.link import WorkerLink

WORKERS, AT_ONCE, SESSIONS = 4, 64, 500


class LostError(Exception):
    """A worker is gone in the middle of a request."""


@pytest.mark.parametrize(
    "requests", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)], ids=str
)
def test_loads_neither_drift_nor_decay_and_come_back_to_zero(requests):
    """Requests end, are left or lose their worker in any order; each gives back what it took."""
    chance = random.Random(7)
    links = [WorkerLink(f"10.0.0.{n}:1", "decode", None, Changes()) for n in range(WORKERS)]
    keys = [number.to_bytes(4, "little") for number in range(SESSIONS)]
    mailbox: asyncio.Queue = asyncio.Queue()
    running: list = []
    expected: Counter[str] = Counter()
    given: Counter[str] = Counter()

    def end() -> None:
        at = chance.randrange(len(running))
        running[at], running[-1] = running[-1], running[at]
        stream, link, tokens, task = running.pop()
        task.end(tokens if chance.random() < 0.9 else None)
        task.end()
        if chance.random() < 0.1:
            with pytest.raises(LostError):
                stream.gen.throw(LostError())
        else:
            stream.__exit__(None, None, None)
        expected[link.address] -= tokens

    for number in range(requests):
        while len(running) >= AT_ONCE:
            end()
        tokens = chance.choice((16, 300, 8000))
        key = keys[chance.randrange(SESSIONS)]
        if number % 2:
            link = by_room(links, float(tokens), key)
            assert link.load == min(other.load for other in links)
        else:
            loads = [other.load for other in links]
            found = [Candidate(x, x.address, x.load, x.load, tokens) for x in links]
            link = by_ttft(found, key).worker
            mean = (sum(loads) + tokens) / WORKERS
            bound = max((1 + BOUND) * mean, min(loads) + tokens)
            assert link.load + tokens <= bound
        stream = link.stream(Xid(str(number), 1), mailbox, float(tokens))
        stream.__enter__()
        task = link.work.begin(tokens / 3)
        running.append((stream, link, tokens, task))
        expected[link.address] += tokens
        given[link.address] += 1
        if number % 1000 == 0:
            assert [link.load for link in links] == [expected[link.address] for link in links]
    while running:
        end()
    assert [link.load for link in links] == [0.0] * WORKERS
    assert [link.work.queue_ms for link in links] == [0.0] * WORKERS
    assert [link.requests for link in links] == [given[link.address] for link in links]
    assert min(given.values()) > requests / WORKERS / 2, "no worker is left out"
    assert not any(link._streams for link in links)
