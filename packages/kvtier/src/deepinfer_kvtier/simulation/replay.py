"""A trace of requests served by a real cache: what the simulator says, from the code that serves.

Every request is looked up, what it hits is loaded and compared, what it misses is put, all at the
times of the trace. With `simulate(as_host=True)` the tokens hit agree exactly.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_kvtier.api.cache import Cache
from deepinfer_kvtier.base.errors import KVTierError
from deepinfer_kvtier.base.values import LayoutSpec, parts
from deepinfer_kvtier.simulation.trace import Request

BLOCK_BYTES = 64


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Totals of one run.

    cpu_us: processor time a request, microseconds, by call: match, load, put.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    cpu_us: dict[str, float]


class ReplayClock:
    """The time of the request being served."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def wall(self) -> float:
        return self.at_s

    def monotonic(self) -> float:
        return self.at_s


def replay(
    cache: Cache,
    clock: ReplayClock,
    requests: Sequence[Request],
    *,
    block_tokens: int = 512,
    flush: bool = False,
) -> ReplayResult:
    """Serve the requests of a trace one after another.

    cache: opened with this clock; its blocks are `BLOCK_BYTES` long.
    flush: wait after every request until tiers below host memory have what it put.
    raises: KVTierError when a block came back wrong or not at all.
    """
    layout = LayoutSpec(block_tokens, {"block": parts(("kv", BLOCK_BYTES))})
    ns = cache.namespace(layout, model="replay")
    asked = hit = 0
    spent = dict.fromkeys(("match", "load", "put"), 0.0)
    for request in requests:
        clock.at_s = request.at_s
        ids = np.asarray(request.blocks, dtype=np.uint32)
        tokens = np.repeat(ids, block_tokens)[: request.tokens]
        started = time.process_time()
        # The simulator lets a hit cover the whole prompt; an engine needs the last token computed.
        match = ns.match(tokens, want=("block",), leave_last=False)
        matched = time.process_time()
        n = match.n_blocks
        room = np.zeros((n, BLOCK_BYTES), dtype=np.uint8)
        loaded = ns.load(match, dst=room, wait=True).wait() if n else None
        done = time.process_time()
        payload = np.frombuffer(b"".join(d + d for d in match.digests), dtype=np.uint8)
        rows = payload.reshape(-1, BLOCK_BYTES)
        if loaded is not None and not (loaded.ok and np.array_equal(room, rows[:n])):
            raise KVTierError(
                f"blocks of the request at {request.at_s} s came back wrong: {loaded}"
            )
        missing = match.digests[n:]
        before = time.process_time()
        if missing:
            ns.put(missing, rows[n:], parents=match.digests[n - 1] if n else None, first_block=n)
        match.release()
        if flush:
            cache.flush()
        ended = time.process_time()
        for call, seconds in zip(
            spent, (matched - started, done - matched, ended - before), strict=True
        ):
            spent[call] += seconds
        asked += request.tokens
        hit += match.n_tokens
    return ReplayResult(
        requests=len(requests),
        prompt_tokens=asked,
        hit_tokens=hit,
        hit_rate=hit / asked if asked else 0.0,
        cpu_us={name: 1e6 * seconds / max(1, len(requests)) for name, seconds in spent.items()},
    )
