"""The seam below the local directory: any object with the methods of `Tier` becomes a tier."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.buffers import copy_views
from deepinfer_kvtier.base.values import APPROXIMATE_BIT, NO_ROW
from deepinfer_kvtier.flow.tier import FOUND, ScanEntry, TierCaps
from deepinfer_kvtier.testing import TierContract


class DictTier:
    """A tier on a dictionary, with the failures a remote store has."""

    def __init__(self, name: str = "far", max_batch: int = 8) -> None:
        self.name = name
        self.caps = TierCaps(persistent=True, shared=True, max_batch=max_batch)
        self.stored: dict[tuple[int, int, bytes], tuple[bytes, kvtier.tier.EncodedRecord]] = {}
        self.down = False
        self.full = False
        self.closed = False
        self.probed: list[int] = []
        self.got: list[int] = []
        self.gate: threading.Event | None = None

    def check(self) -> None:
        if self.down:
            raise OSError(110, "unreachable")

    def probe(self, kind, shard, digests):
        self.check()
        self.probed.append(len(digests))
        rows = np.zeros(len(digests), dtype=FOUND)
        rows["length"] = NO_ROW
        for row, digest in zip(rows, digests, strict=True):
            found = self.stored.get((kind, shard, digest))
            if found is not None:
                payload, out = found
                row["length"] = len(payload)
                row["flags"] = out.generation | (APPROXIMATE_BIT if out.approximate else 0)
        return rows

    def get_into(self, kind, shard, wanted, *, in_time):
        self.check()
        self.got.append(len(wanted))
        statuses = []
        for want in wanted:
            if not in_time():
                statuses.append(kvtier.Status.TIMEOUT)
                continue
            found = self.stored.get((kind, shard, want.digest))
            if found is None:
                statuses.append(kvtier.Status.MISS)
                continue
            payload, out = found
            if xxhash.xxh3_128_digest(payload) != out.checksum:
                statuses.append(kvtier.Status.CORRUPT)
                continue
            at = 0
            for view in want.views:
                view[:] = payload[at : at + view.nbytes]
                at += view.nbytes
            want.parent, want.depth, want.checksum = out.parent, out.depth, out.checksum
            want.approximate, want.generation = out.approximate, out.generation
            statuses.append(kvtier.Status.OK)
        return statuses

    def put_from(self, batch):
        if self.gate is not None:
            assert self.gate.wait(60)
        self.check()
        if self.full:
            return [kvtier.Status.FULL] * len(batch)
        for out in batch:
            data = np.empty(out.nbytes, np.uint8)
            copy_views(out.views, data)
            self.stored[out.kind, out.shard, out.digest] = data.tobytes(), out
        return [kvtier.Status.OK] * len(batch)

    def delete(self, kind, shard, digests):
        self.check()
        gone = [self.stored.pop((kind, shard, digest), None) for digest in digests]
        return sum(record is not None for record in gone)

    def scan(self, cursor):
        return [
            ScanEntry(k, s, d[:16], len(p), 0) for (k, s, d), (p, _) in self.stored.items()
        ], None

    def usage(self):
        return {"entries": len(self.stored)}

    def health(self):
        return "down" if self.down else "ok"

    def sync(self):
        self.check()

    def maintain(self):
        self.check()

    def close(self):
        self.closed = True


class TestDictTier(TierContract):
    def make(self):
        return DictTier()


@pytest.fixture
def far():
    return DictTier()


def filled(far, tmp_path, make_model, blocks=20, **keywords):
    """A far tier that another machine has filled."""
    with kvtier.open(tmp_path / "elsewhere", secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, blocks)
        assert model.store(tokens, states=(blocks // 2,), **keywords).wait(60)
        assert cache.flush().done
    return tokens


def test_a_machine_with_empty_tiers_loads_from_the_further_one(far, tmp_path, make_model):
    tokens = filled(far, tmp_path, make_model)
    with kvtier.open(tmp_path / "here", secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        with model.ns.match(tokens) as match:
            assert (match.n_blocks, match.block_prefix) == (10, 20)
            assert [(s.tier, s.count) for s in match.spans] == [("far", 10)]
            assert match.state.tier == "far"
        assert model.load_all(tokens) == (20, 20)
        assert max(far.got) <= 8, "batches are split to what the tier takes"
        with model.ns.match(tokens, want=("block",)) as match:
            assert [s.tier for s in match.spans] == ["host"], "what was loaded is in memory now"
        assert cache.stats()["hits"]["hit_tokens_far"] == (10 + 20) * 128


def test_each_tier_is_asked_only_for_what_is_missing_above_it(far, tmp_path, make_model):
    tokens = filled(far, tmp_path, make_model)
    far.probed.clear()
    with kvtier.open(tmp_path / "here", secret=bytes(32), host_bytes=0, tiers=[far]) as cache:
        model = make_model(cache)
        digests = model.digests(tokens)
        model.store(tokens[: 12 * 128], durability="flushed").wait(60)
        cache.flush()
        for digest in digests[4:8]:
            cache.disk.tombstone(0, 0, [digest])
        far.probed.clear()
        with model.ns.match(tokens, want=("block",)) as match:
            tiers = [(span.tier, span.start, span.count) for span in match.spans]
        assert tiers == [("disk", 0, 4), ("far", 4, 4), ("disk", 8, 4), ("far", 12, 8)]
        assert far.probed[0] == 12
        assert model.load_all(tokens) == (20, 20)


def test_a_damaged_record_of_the_directory_comes_from_the_next_tier(far, store, make_model):
    with kvtier.open(store, host_bytes=0, tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 6)
        model.store(tokens, durability="flushed").wait(60)
        cache.flush()
        (segment,) = store.glob("w/*/seg-*.kvs")
        raw = bytearray(segment.read_bytes())
        raw[4096 + 100] ^= 1
        segment.write_bytes(raw)
        assert model.load_all(tokens) == (6, 6)
        assert cache.stats()["disk"]["corrupt"] == 1


def test_without_a_directory_the_further_tier_makes_puts_durable(far, make_model):
    with kvtier.open(host_bytes=1 << 20, secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        ticket = model.store(model.prompt(1, 4), durability="flushed")
        assert ticket.wait(60)
        assert len(far.stored) == 4
    assert far.closed


def test_sources_are_free_before_a_slow_further_tier_has_read_them(far, store, make_model):
    """copy=False promises that the source is not read once the ticket is done."""
    far.gate = threading.Event()
    with kvtier.open(store, tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        digests = model.digests(tokens)
        source = np.full((3, 5_000), 7, np.uint8)
        ticket = model.ns.put(digests, source, copy=False, durability="flushed")
        assert ticket.wait(60)
        source[:] = 9
        far.gate.set()
        assert cache.flush().done
    assert {payload[:1] for payload, _ in far.stored.values()} == {b"\7"}


def test_a_hung_further_tier_delays_neither_puts_nor_the_directory(far, store, make_model):
    far.gate = threading.Event()
    with kvtier.open(store, tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 5)
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.store(model.prompt(2, 5), durability="flushed").wait(60)
        assert len(far.stored) == 0
        far.gate.set()
        assert cache.flush().done
        assert len(far.stored) == 10


def test_an_unreachable_tier_is_a_miss_and_then_left_alone(far, tmp_path, make_model):
    tokens = filled(far, tmp_path, make_model)
    far.down = True
    with kvtier.open(tmp_path / "here", secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        for _ in range(8):
            assert model.block_hits(tokens) == 0
        tier = cache.stats()["tiers"]["far"]
        assert tier["probe_errors"] == 5
        assert tier["health"] == "down"
        assert cache.stats()["health"] == "degraded", "an operator looks here first"
        far.probed.clear()
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.load_all(tokens) == (20, 20)


def test_a_tier_that_fails_between_match_and_load_reports_errors(far, tmp_path, make_model):
    tokens = filled(far, tmp_path, make_model)
    with kvtier.open(tmp_path / "here", secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        with model.ns.match(tokens, want=("block",)) as match:
            far.down = True
            dst = np.zeros((20, 5_000), np.uint8)
            result = model.ns.load(match, dst=dst, wait=True).wait()
        assert result.ok_prefix == 0
        assert kvtier.Status.ERROR in result.blocks


def test_a_full_tier_gives_up_and_the_others_keep_the_records(far, store, make_model, monkeypatch):
    monkeypatch.setattr("deepinfer_kvtier.flow.write_queue.BACKOFF_FIRST_S", 0.001)
    far.full = True
    with kvtier.open(store, tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 5)
        assert model.store(tokens, durability="flushed").wait(60)
        cache.flush()
        assert cache.stats()["lower_queues"]["far"]["failed_records"] == 5
        assert model.load_all(tokens) == (5, 5)


def test_drop_reaches_further_tiers(far, store, make_model, check_leaks):
    with kvtier.open(store, tiers=[far]) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 5)
        model.store(tokens)
        cache.flush()
        assert len(far.stored) == 5
        assert model.ns.drop(model.digests(tokens)) == 5
        assert not far.stored
        assert model.block_hits(tokens) == 0
        check_leaks(cache)


def test_approximate_records_of_a_further_tier_carry_their_marks(far, tmp_path, make_model):
    tokens = filled(far, tmp_path, make_model, approximate=True, replay_generation=3)
    with kvtier.open(tmp_path / "here", secret=bytes(32), tiers=[far]) as cache:
        model = make_model(cache)
        with model.ns.match(tokens, want=("block",)) as match:
            assert (match.approximate, match.replay_generation) == (True, 3)
        assert model.block_hits(tokens, accept_approximate=False) == 0


def test_a_tier_that_keeps_no_seals_is_not_given_encrypted_records(far, store, make_model):
    pytest.importorskip("cryptography")
    with kvtier.open(store, tiers=[far], encryption_key=bytes(32)) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 5)
        assert model.store(tokens, durability="flushed").wait(60)
        assert cache.flush().done
        assert not far.stored
        assert cache.stats()["tiers"]["far"]["sealed_skipped"] == 5
        assert model.load_all(tokens) == (5, 5)


def test_two_tiers_are_asked_in_order(tmp_path, make_model):
    near, far = DictTier("near"), DictTier("far")
    tokens = filled(far, tmp_path, make_model)
    near.stored = dict(list(far.stored.items())[:9])
    with kvtier.open(host_bytes=0, secret=bytes(32), tiers=[near, far]) as cache:
        model = make_model(cache)
        assert model.load_all(tokens) == (20, 20)
        with model.ns.match(tokens, want=("block",)) as match:
            assert {span.tier for span in match.spans} == {"near", "far"}


@pytest.mark.parametrize("names", [("disk",), ("far", "far"), ("host", "x")])
def test_tiers_need_names_of_their_own(names):
    with pytest.raises(kvtier.ConfigError, match="different names"):
        kvtier.open(tiers=[DictTier(name) for name in names])


def test_a_tier_that_raises_what_no_tier_may_costs_its_records_and_not_its_thread(make_model):
    class Wrong(DictTier):
        def put_from(self, batch):
            if self.down:
                raise ValueError("not an OSError")
            return super().put_from(batch)

    tier = Wrong()
    with kvtier.open(host_bytes=0, tiers=[tier]) as cache:
        model = make_model(cache)
        tier.down = True
        assert not model.store(model.prompt(1, 3), durability="flushed").wait(60)
        tier.down = False
        assert model.store(model.prompt(2, 3), durability="flushed").wait(60)
        assert model.load_all(model.prompt(2, 3)) == (3, 3)
