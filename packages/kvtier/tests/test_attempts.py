"""Writes that fail: each chain for itself, and what builds on what was lost is not written."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.flow.write_queue import QueueEntry, chains_of

BLOCK_BYTES = 5_000


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr("deepinfer_kvtier.flow.write_queue.BACKOFF_FIRST_S", 0.001)


class Poison:
    """A directory that cannot write certain records."""

    def __init__(self, cache, monkeypatch, error=None) -> None:
        self.digests = set()
        self.error = error or OSError(errno.EIO, "this one does not work")
        self.calls = []
        self._write = cache.disk.put_from
        monkeypatch.setattr(cache.disk, "put_from", self.put_from)

    def put_from(self, batch):
        self.calls.append(len(batch))
        if self.digests & {out.digest for out in batch}:
            raise self.error
        return self._write(batch)


@pytest.mark.parametrize("error", [None, ValueError("no tier may")])
def test_a_chain_that_cannot_be_written_costs_no_other_chain(store, make_model, monkeypatch, error):
    with kvtier.open(store, commit_delay_s=30) as cache:
        model, poison = make_model(cache), Poison(cache, monkeypatch, error)
        good, bad, better = (model.prompt(seed, 4) for seed in (1, 2, 3))
        poison.digests = set(model.digests(bad)[1:2])
        tickets = [model.store(tokens, durability="flushed") for tokens in (good, bad, better)]
        cache.flush()
        assert [ticket.wait(60) for ticket in tickets] == [True, False, True]
        stats = cache.stats()
        assert stats["queue"]["failed_records"] == 4
        assert not stats["disk"]["breaker_open"]
        assert stats["disk"]["entries"] == 8
        poison.digests = set()
        again = model.store(bad, durability="flushed")
        cache.flush()
        assert again.wait(60)


def test_what_waits_behind_a_lost_record_is_lost_with_it_and_the_rest_goes_on(
    store, make_model, monkeypatch
):
    with kvtier.open(store, commit_delay_s=30, commit_blocks=2) as cache:
        model, poison = make_model(cache), Poison(cache, monkeypatch)
        bad, good = model.prompt(1, 9), model.prompt(2, 3)
        poison.digests = set(model.digests(bad)[:1])
        lost = model.store(bad, states=(9,), durability="flushed")
        kept = model.store(good, durability="flushed")
        cache.flush()
        assert not lost.wait(60)
        assert not any(lost.stored)
        assert kept.wait(60)
        # The state was put before its block: it went first, by itself.
        assert cache.stats()["disk"]["entries"] == 3 + 1
        assert cache.stats()["queue"]["failed_records"] == 9


def test_a_state_that_waits_for_its_lost_block_is_lost_too(store, make_model, monkeypatch):
    with kvtier.open(store, commit_delay_s=30, commit_blocks=1) as cache:
        model, poison = make_model(cache), Poison(cache, monkeypatch)
        tokens = model.prompt(1, 1)
        (digest,) = model.digests(tokens)
        poison.digests = {digest}
        model.store(tokens)
        ticket = model.ns.put_state(digest, bytes(9_001), n_blocks=1, durability="flushed")
        cache.flush()
        assert not ticket.wait(60)
        assert poison.calls == [1] * 5


def test_further_tiers_still_get_what_the_directory_could_not_take(
    store, make_model, monkeypatch, tmp_path
):
    pytest.importorskip("obstore")
    far = kvtier.S3TierConfig(url=f"file://{tmp_path}")
    with kvtier.open(
        store, tiers=[far], secret=bytes(32), commit_delay_s=30, commit_blocks=2
    ) as cache:
        model, poison = make_model(cache), Poison(cache, monkeypatch)
        tokens = model.prompt(1, 6)
        poison.digests = set(model.digests(tokens)[:1])
        model.store(tokens)
        cache.flush()
        (tier,) = cache.further
        assert tier.counts["put_records"] == 6


@given(st.lists(st.integers(-1, 12), max_size=12))
def test_chains_share_nothing_and_keep_their_order(parents):
    def item(number, parent):
        digest = bytes([number]) * 32
        before = (
            bytes([100 + parent % 100]) * 32 if parent >= number else bytes([parent % 256]) * 32
        )
        return QueueEntry(
            SimpleNamespace(kind=0, digest=digest, parent=before), None, staged=True, queued_at=0.0
        )

    items = [item(number, parent) for number, parent in enumerate(parents)]
    groups = chains_of(items)
    assert sorted(map(id, items)) == sorted(id(i) for group in groups for i in group)
    number_of = {id(group_item): n for n, group in enumerate(groups) for group_item in group}
    for number, parent in enumerate(parents):
        if 0 <= parent < number:
            assert number_of[id(items[number])] == number_of[id(items[parent])]
    for group in groups:
        order = [items.index(member) for member in group]
        assert order == sorted(order)
        assert sum(not 0 <= parents[i] < i for i in order) == 1, "a group has one beginning"


def test_under_pressure_a_chain_that_is_on_disk_goes_on_and_others_wait_outside(store, make_model):
    limit = 10 * BLOCK_BYTES
    with kvtier.open(store, queue_bytes=limit, commit_delay_s=30, host_bytes=0) as cache:
        model = make_model(cache)
        known = model.prompt(1, 3)
        model.store(known[: 2 * 128])
        cache.flush()
        assert all(model.store(model.prompt(2, 9)).accepted)
        assert model.store(model.prompt(3, 1)).reasons == ("queue_full",)
        # Decode puts its blocks one by one, each behind the last one.
        assert model.store(known, first=2).accepted == (True,)
        cache.flush()
        assert model.block_hits(known) == 3
