"""One record in a thousand is read back, and a store in which nothing is found is noticed."""

from __future__ import annotations

import errno

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.flow.tiers import Written, from_disk
from deepinfer_kvtier.testing import FaultIo, ManualClock


@pytest.fixture
def io():
    return FaultIo(0)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def cache(store, io, clock):
    # A batch is one record, and every tenth is a reason to read one back.
    settings = {"commit_blocks": 1, "readback_every": 10, "verify_threads": 0, "auto_gc": False}
    with kvtier.open(store, io=io, clock=clock, **settings) as opened:
        yield opened


def put(model, seed, blocks=10):
    tokens = model.prompt(seed, blocks)
    assert model.store(tokens, durability="flushed").wait(60)
    model.cache.flush()
    return tokens


def seen(cache):
    facts = cache.stats()["readback"]
    return tuple(facts[f"l2_readback_{what}"] for what in ("ok", "bad", "gone"))


def test_one_earlier_record_in_every_so_many_is_read_back_from_the_directory(cache, make_model):
    model = make_model(cache)
    for seed in range(5):
        put(model, seed)
    assert seen(cache) == (5, 0, 0)
    assert cache.stats()["disk"]["read_records"] == 5, "they do not come from memory"
    assert cache.stats()["readback"]["l2_readback_ok_ratio"] == 1.0
    assert cache.stats()["health"] == "ok"


@pytest.mark.parametrize(
    "plan",
    [
        {"preadv": {"short": 1.0}},
        {"preadv": {"eio": 1.0}},
        {"pwritev": {"lost": 1.0}},
    ],
)
def test_storage_that_does_not_give_back_what_it_took_degrades_health(
    cache, make_model, io, plan, caplog
):
    model = make_model(cache)
    if "preadv" in plan:
        put(model, 1, 9)
        io.set_rates(plan)
        put(model, 2, 1)
    else:
        io.set_rates(plan)
        put(model, 1)
    assert seen(cache) == (0, 1, 0)
    assert cache.stats()["readback"]["l2_readback_ok_ratio"] == 0.0
    assert cache.stats()["health"] == "degraded"
    assert "kvtier_l2_readback_ok_ratio 0.0" in cache.metrics()
    assert "reads back as" in caplog.text


def test_what_was_dropped_or_collected_is_no_failure(cache, make_model, store, clock):
    model = make_model(cache)
    tokens = put(model, 1, 9)
    model.ns.drop(model.digests(tokens))
    put(model, 2, 1)
    assert seen(cache) == (0, 0, 1)
    cache.disk.seal()
    with kvtier.open(store, clock=clock, quota_bytes=4096, auto_gc=False) as other:
        assert other.gc().bytes_freed > 0
    put(model, 3)
    ok, bad, gone = seen(cache)
    assert (ok + gone, bad) == (2, 0)
    assert cache.stats()["health"] == "ok"


def test_a_file_that_another_process_collected_is_told_from_one_that_was_lost(
    cache, make_model, store, clock
):
    model = make_model(cache)
    collected = put(model, 1, 3)
    cache.disk.seal()
    with kvtier.open(store, clock=clock, quota_bytes=4096, auto_gc=False) as other:
        assert other.gc().segments_evicted == 1
    read = from_disk(cache.disk)
    assert read(Written(0, 0, model.digests(collected)[0], 5_000)) is None
    lost = put(model, 2, 3)
    cache.disk.seal()
    for path in store.rglob("*.kvs"):
        path.unlink()
    assert read(Written(0, 0, model.digests(lost)[0], 5_000)) is kvtier.Status.MISS


def test_nothing_is_read_back_where_it_is_switched_off(store, make_model):
    with kvtier.open(store, readback_every=0, commit_blocks=1) as cache:
        model = make_model(cache)
        for seed in range(3):
            put(model, seed)
        assert seen(cache) == (0, 0, 0)
        assert cache.stats()["disk"].get("read_records", 0) == 0


def test_a_failing_audit_costs_no_write(cache, make_model, io, monkeypatch):
    model = make_model(cache)
    put(model, 1, 9)

    def fail(*_, **__):
        raise OSError(errno.EIO, "no logs today")

    monkeypatch.setattr(cache.disk, "refresh", fail)
    io.set_rates({"preadv": {"short": 1.0}})
    put(model, 2, 1)
    assert seen(cache)[1] == 1
    io.set_rates({})
    monkeypatch.undo()
    assert put(model, 3) is not None


def test_ten_minutes_of_writes_and_lookups_without_a_hit_are_an_alarm(cache, make_model, clock):
    writer, reader = make_model(cache), make_model(cache, salt="another identity by mistake")
    for minute in range(11):
        tokens = put(writer, minute, 2)
        assert reader.block_hits(tokens) == 0
        assert cache.stats()["health"] == ("ok" if minute < 10 else "degraded")
        clock.advance(60)
    assert "kvtier_l2_silent 1" in cache.metrics()
    assert writer.block_hits(tokens) == 2
    assert cache.stats()["health"] == "ok"
    put(writer, 99, 2)
    clock.advance(600)
    assert cache.stats()["health"] == "ok", "nobody has asked since"


def test_a_pause_is_no_alarm(cache, make_model, clock):
    model = make_model(cache)
    tokens = put(model, 1, 2)
    assert model.block_hits(tokens) == 2
    clock.advance(3600)
    assert model.block_hits(put(model, 2, 2)[1:]) == 0
    assert cache.stats()["health"] == "ok"


def test_an_object_store_is_read_back_too(make_model, tmp_path):
    pytest.importorskip("obstore")
    url = f"file://{tmp_path}"
    with kvtier.open(
        tiers=[kvtier.S3TierConfig(url=url, linger_s=0.01)],
        secret=bytes(32),
        readback_every=2,
        persist_state=False,
    ) as cache:
        model = make_model(cache)
        for seed in range(4):
            put(model, seed, 3)
        ok, bad, gone = seen(cache)
        assert (ok, bad + gone) == (3, 0)
