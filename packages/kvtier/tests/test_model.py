"""Random operations against a plain dictionary: what the cache may answer, and what it must."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock, payload_of

BLOCK_BYTES, STATE_BYTES, BLOCK_TOKENS = 700, 900, 4
LAYOUT = kvtier.LayoutSpec(
    BLOCK_TOKENS,
    {
        "block": kvtier.parts(("index", 200), ("main", 500)),
        "state": kvtier.parts(("swa", STATE_BYTES)),
    },
)
# Three families of prompts that share beginnings: chains branch after block 2 and after block 4.
FAMILIES = [[1] * 40, [1] * 10 + [2] * 30, [1] * 18 + [3] * 22]
PROMPT = st.tuples(st.sampled_from(range(3)), st.integers(1, 9))


class TwoProcesses(RuleBasedStateMachine):
    """Two caches on one directory, one of them small; every flushed record must be found by both
    until it is dropped or its time is over, and no byte may ever be wrong."""

    layout, repeat, compression = LAYOUT, 1, ("none", "none")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.root = Path(tempfile.mkdtemp())
        self.caches = [self.opened(0), self.opened(1)]
        self.flushed: dict[tuple[str, bytes], float] = {}
        self.known: set[tuple[str, bytes]] = set()

    def opened(self, which: int) -> kvtier.Cache:
        return kvtier.open(
            self.root / "store",
            clock=self.clock,
            host_bytes=(1 << 20, 5 * self.layout.payload_bytes("block"))[which],
            compression=self.compression[which],
            segment_bytes=1 << 15,
            commit_delay_s=0,
            min_free_share=0.0,
        )

    def ns(self, which: int) -> kvtier.Namespace:
        return self.caches[which].namespace(self.layout, model="m", salt="s")

    def content(self, seed: bytes, kind: str) -> np.ndarray:
        """What a record must hold: random bytes, each of them `repeat` times in a row."""
        return np.repeat(
            payload_of(seed, self.layout.payload_bytes(kind) // self.repeat), self.repeat
        )

    def chain(self, prompt: tuple[int, int]) -> tuple[list[int], tuple[bytes, ...]]:
        family, blocks = prompt
        tokens = FAMILIES[family][: blocks * BLOCK_TOKENS]
        hasher = self.ns(0).hasher()
        hasher.extend(tokens)
        return [*tokens, 0], hasher.digests

    @rule(which=st.integers(0, 1), prompt=PROMPT, first=st.integers(0, 3), copy=st.booleans())
    def put(self, which: int, prompt: tuple[int, int], first: int, copy: bool) -> None:
        _, digests = self.chain(prompt)
        first = min(first, len(digests) - 1)
        ns = self.ns(which)
        ticket = ns.put(
            digests[first:],
            [self.content(d, "block") for d in digests[first:]],
            parents=ns.root if first == 0 else digests[first - 1],
            first_block=first,
            copy=copy,
            durability="flushed",
        )
        assert ticket.wait(20)
        for digest in digests[first:]:
            self.flushed["block", digest] = self.clock.wall()
            self.known.add(("block", digest))

    @rule(which=st.integers(0, 1), prompt=PROMPT)
    def put_state(self, which: int, prompt: tuple[int, int]) -> None:
        _, digests = self.chain(prompt)
        payload = self.content(digests[-1] + b"state", "state")
        ticket = self.ns(which).put_state(
            digests[-1], payload, n_blocks=len(digests), durability="flushed"
        )
        assert ticket.wait(20)
        self.flushed["state", digests[-1]] = self.clock.wall()
        self.known.add(("state", digests[-1]))

    @rule(which=st.integers(0, 1), prompt=PROMPT, release=st.booleans())
    def look_and_load(self, which: int, prompt: tuple[int, int], release: bool) -> None:
        tokens, digests = self.chain(prompt)
        ns = self.ns(which)
        match = ns.match(tokens)
        expected = 0
        while expected < len(digests) and ("block", digests[expected]) in self.flushed:
            expected += 1
        assert match.block_prefix >= expected
        assert all(("block", d) in self.known for d in digests[: match.block_prefix])
        states = [i + 1 for i in range(expected) if ("state", digests[i]) in self.flushed]
        assert match.n_blocks >= max(states, default=0)
        room = np.full((match.block_prefix, self.layout.payload_bytes("block")), 0xAA, np.uint8)
        state = np.full(self.layout.payload_bytes("state"), 0xAA, np.uint8)
        result = ns.load(
            match,
            blocks=slice(0, match.block_prefix),
            dst=room,
            state_dst=state if match.state else None,
            wait=True,
        ).wait()
        assert result.ok, "nothing is broken, so everything that matched must load"
        for row, digest in zip(room, digests, strict=False):
            assert np.array_equal(row, self.content(digest, "block"))
        if match.state is not None:
            digest = digests[match.state.n_blocks - 1]
            assert np.array_equal(state, self.content(digest + b"state", "state"))
        if release:
            match.release()

    @rule(which=st.integers(0, 1), prompt=PROMPT, kind=st.sampled_from(["block", "state"]))
    def drop(self, which: int, prompt: tuple[int, int], kind: str) -> None:
        _, digests = self.chain(prompt)
        self.ns(which).drop([digests[-1]], kinds=(kind,))
        # Between processes, order is known to the millisecond.
        self.clock.advance(0.002)
        self.flushed.pop((kind, digests[-1]), None)

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.caches[which].close()
        self.caches[which] = self.opened(which)

    @rule(which=st.integers(0, 1))
    def collect(self, which: int) -> None:
        self.caches[which].gc()

    @precondition(lambda self: self.flushed)
    @rule(hours=st.sampled_from([0.01, 30, 100]))
    def time_passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)
        horizon = self.clock.wall() - 168 * 3600
        # Hits renew a lifetime, so records may live longer than the oracle demands.
        self.flushed = {key: at for key, at in self.flushed.items() if at > horizon}

    @invariant()
    def books_balance(self) -> None:
        for cache in self.caches:
            cache.host.audit()

    def teardown(self) -> None:
        for cache in self.caches:
            cache.flush()
            cache.leases.release_all()
            assert cache.host.pins() == 0
            assert cache.disk.segments.users() == 0
            cache.close()
        shutil.rmtree(self.root)


class TwoCompressing(TwoProcesses):
    """The same with records that shrink, and a setting that differs between the processes."""

    layout = kvtier.LayoutSpec(
        BLOCK_TOKENS,
        {
            "block": kvtier.parts(("index", 2_000), ("main", 12_000)),
            "state": kvtier.parts(("swa", 9_000)),
        },
    )
    repeat, compression = 8, ("zstd-1", "shuffle+zstd-1")


TestTwoProcesses = TwoProcesses.TestCase
TestTwoCompressing = TwoCompressing.TestCase
# 1,000 steps here; `nox -s kvtier-faults` takes 100,000.
EXAMPLES = int(os.environ.get("KVTIER_MODEL_STEPS", "1000")) // 25
TestTwoProcesses.settings = settings(max_examples=EXAMPLES, stateful_step_count=25)
TestTwoCompressing.settings = settings(max_examples=EXAMPLES // 2, stateful_step_count=25)
