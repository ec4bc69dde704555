"""Tensor-parallel groups: threads here, with a cache and a shard each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

LAYOUT = kvtier.LayoutSpec(
    4, {"block": kvtier.parts(("kv", 64)), "state": kvtier.parts(("window", 16))}
)
TOKENS = list(range(33))


def everywhere(size, call):
    """`call(rank)` on all ranks at the same time; their results in rank order."""
    with ThreadPoolExecutor(size) as threads:
        return [f.result(timeout=60) for f in [threads.submit(call, r) for r in range(size)]]


def test_the_least_value_is_known_to_all():
    group = kvtier.GroupAgree.local(3)
    assert everywhere(3, lambda rank: group[rank].min([7, 4, 9][rank])) == [4, 4, 4]


RANKS = st.lists(
    st.tuples(st.integers(0, 8), st.sets(st.integers(1, 8), max_size=4)), min_size=2, max_size=3
)


@given(RANKS)
def test_all_ranks_use_the_deepest_boundary_that_each_of_them_has(ranks):
    """Every rank holds some leading blocks and some states; they must end at the same one."""
    caches = [kvtier.open(host_bytes=1 << 20) for _ in ranks]
    try:
        spaces = []
        for rank, (blocks, states) in enumerate(ranks):
            ns = caches[rank].namespace(
                LAYOUT, model="m", salt="t", shard=kvtier.Shard(rank, len(ranks), "tp")
            )
            hasher = ns.hasher()
            hasher.extend(TOKENS)
            digests = hasher.digests
            ns.put(digests[:blocks], [payload_of(d, 64) for d in digests[:blocks]])
            for n in states:
                ns.put_state(digests[n - 1], payload_of(digests[n - 1], 16), n_blocks=n)
            spaces.append(ns)
        group = kvtier.GroupAgree.local(len(ranks))
        matches = everywhere(len(ranks), lambda r: group[r].match(spaces[r], TOKENS))
        usable = [
            n for n in range(1, 9) if all(n <= blocks and n in states for blocks, states in ranks)
        ]
        assert [m.n_blocks for m in matches] == [max(usable, default=0)] * len(ranks)
        for match in matches:
            match.release()
        assert all(cache.host.pins() == 0 for cache in caches)
    finally:
        for cache in caches:
            cache.close()


@given(st.binary(min_size=32, max_size=32), st.integers(1, 8))
def test_exactly_one_rank_writes_a_replicated_record(digest, size):
    ranks = [kvtier.GroupAgree(rank, size, lambda n: [n]) for rank in range(size)]
    assert sum(rank.writes(digest) for rank in ranks) == 1


def test_writers_are_spread_over_the_ranks():
    ranks = kvtier.GroupAgree.local(4)
    digests = [payload_of(bytes([i]), 32).tobytes() for i in range(200)]
    counts = [sum(rank.writes(d) for d in digests) for rank in ranks]
    assert min(counts) > 25


def test_a_group_that_answers_for_fewer_ranks_is_refused():
    with pytest.raises(kvtier.ConfigError, match="3 ranks, gather answered 2"):
        kvtier.GroupAgree(0, 3, lambda n: [n, n]).min(1)
    with pytest.raises(kvtier.ConfigError, match="rank 3 of 3"):
        kvtier.GroupAgree(3, 3, lambda n: [n] * 3)
