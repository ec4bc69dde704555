"""A mounted store with a location service in place of followed logs."""

from __future__ import annotations

import os

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.remote.location.server import LocationServer
from deepinfer_kvtier.testing import ManualClock

SECRET = bytes(32)
KEY = b"k" * 32


@pytest.fixture
def shards(serve):
    return [serve(key=KEY) for _ in range(3)]


@pytest.fixture
def open_fleet(tmp_path, shards):
    opened = []

    def make(urls=None, clock=None, compression="none", **changes):
        fleet = kvtier.FleetTierConfig(
            path=tmp_path / "mount",
            locations=tuple(urls or (one.url for one in shards)),
            key=KEY,
            deadline_s=5.0,
            **changes,
        )
        cache = kvtier.open(
            host_bytes=0,
            secret=SECRET,
            tiers=[fleet],
            clock=clock,
            min_free_share=0.0,
            compression=compression,
        )
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


def test_another_machine_finds_blocks_through_the_service_alone(open_fleet, make_model):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 40)
    model.store(tokens, states=(40,))
    assert one.flush().done
    assert reader.load_all(tokens) == (40, 40)
    with reader.ns.match(tokens) as match:
        assert match.n_blocks == 40
        assert match.state is not None
    assert two.further[0].tier._files.logs() == {}, "no log of another writer was read"


def test_the_service_knows_compressed_records_by_their_stored_length(open_fleet, tmp_path):
    one, two = open_fleet(compression="zstd-1"), open_fleet()
    layout = kvtier.LayoutSpec(128, {"block": kvtier.parts(("flat", 30_000), ("noise", 1_000))})
    tokens = list(range(6 * 128))
    source = np.random.default_rng(1).integers(0, 256, (6, 31_000), dtype=np.uint8)
    source[:, :30_000] = np.arange(6, dtype=np.uint8)[:, None]
    ns = one.namespace(layout, model="m", salt="t")
    ns.put(ns.match(tokens).digests, source)
    assert one.flush().done
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.kvs")) < 6 * 31_000 // 2
    reader = two.namespace(layout, model="m", salt="t")
    room = np.zeros_like(source)
    with reader.match(tokens, leave_last=False) as match:
        assert reader.load(match, dst=room, wait=True).wait().ok
    assert np.array_equal(room, source)


def test_a_long_prompt_takes_two_search_rounds(open_fleet, make_model):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 600)
    digests = model.digests(tokens)
    model.ns.put(digests[:431], np.zeros((431, 5_000), dtype=np.uint8))
    assert one.flush(60).done
    assert reader.block_hits(tokens) == 431
    usage = two.stats()["tiers"]["fleet"]
    assert usage["location_search_rounds"] == 2
    assert usage["location_search_keys"] <= 48
    assert usage["location_lookup_keys"] <= 48 + 431 + 24


def test_a_hole_that_the_search_steps_over_ends_the_hit(open_fleet, make_model):
    import numpy as np

    one, two, three = open_fleet(), open_fleet(), open_fleet()
    model = make_model(one)
    tokens = model.prompt(1, 300)
    digests = model.digests(tokens)
    model.ns.put(digests, np.zeros((300, 5_000), dtype=np.uint8))
    assert one.flush(60).done
    client = one.further[0].tier._client
    from deepinfer_kvtier.remote.location.messages import key_of

    lost = key_of(digests[101], 0, 0)
    (place,) = client.lookup([lost])
    client.retract([lost])
    assert make_model(two).block_hits(tokens) == 101
    assert two.stats()["tiers"]["fleet"]["location_search_keys"] <= 48, "it was not asked for"
    client.publish([(lost, place)], ttl_s=60)
    assert make_model(three).block_hits(tokens) == 300


def test_wrong_hints_are_misses(open_fleet, make_model, tmp_path):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens, others = model.prompt(1, 6), model.prompt(2, 6)
    model.store(tokens)
    model.store(others)
    one.flush()
    client = one.further[0].tier._client
    from deepinfer_kvtier.remote.location.messages import key_of

    keys = [key_of(d, 0, 0) for d in model.digests(tokens)]
    wrong = [key_of(d, 0, 0) for d in model.digests(others)]
    values = client.lookup(keys)
    client.publish(list(zip(wrong, values, strict=True)), ttl_s=60)
    client.publish([(keys[3], b"\xff" * 46), (keys[4], b"short")], ttl_s=60)
    matched, right = reader.load_all(others)
    assert (matched, right) == (6, 0)
    assert reader.load_all(tokens)[1] == 3
    assert model.load_all(others) == (6, 6), "who wrote them knows better"


def test_a_directory_that_forgot_everything_costs_misses_and_is_filled_again(
    open_fleet, make_model, shards
):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 5)
    model.store(tokens)
    one.flush()
    for shard in shards:
        shard.server.map._items.clear()
    assert reader.block_hits(tokens) == 0
    reader.store(tokens)
    two.flush()
    third = make_model(open_fleet())
    assert third.load_all(tokens) == (5, 5)


def test_without_any_shard_the_own_blocks_are_still_there(open_fleet, make_model, shards):
    one = open_fleet()
    model = make_model(one)
    tokens = model.prompt(1, 5)
    model.store(tokens)
    one.flush()
    for shard in shards:
        shard.run(shard.server.close())
    assert model.load_all(tokens) == (5, 5)
    assert model.block_hits(model.prompt(2, 5)) == 0


def test_a_deleted_segment_is_a_miss(open_fleet, make_model, tmp_path):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 5)
    model.store(tokens)
    one.flush()
    for path in (tmp_path / "mount").glob("w/*/seg-*"):
        os.unlink(path)
    assert reader.load_all(tokens) == (5, 0)
    assert reader.block_hits(tokens) == 0


def test_dropped_records_are_gone_for_everybody(open_fleet, make_model):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 5)
    model.store(tokens)
    one.flush()
    assert model.ns.drop(model.digests(tokens)) == 5
    assert model.block_hits(tokens) == 0
    assert reader.block_hits(tokens) == 0


def test_places_of_others_are_let_go_and_asked_for_again(open_fleet, make_model):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 8)
    model.store(tokens)
    one.flush()
    assert reader.block_hits(tokens) == 8
    tier = two.further[0].tier
    assert len(tier._files.index) == 8
    import numpy as np

    with reader.ns.match(tokens, want=("block",)) as match:
        tier.maintain()
        assert len(tier._files.index) == 0
        dst = np.zeros((8, 5_000), dtype=np.uint8)
        result = reader.ns.load(match, dst=dst, wait=True).wait()
        assert reader.check(match, result, dst) == 8, "what was matched can still be loaded"
    tier.maintain()
    model.ns.drop(model.digests(tokens))
    assert reader.block_hits(tokens) == 0


def test_what_is_there_is_announced_again_and_not_written_again(open_fleet, make_model, shards):
    one, two = open_fleet(), open_fleet()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 5)
    for _ in range(2):
        for shard in shards:
            shard.server.map._items.clear()
        model.store(tokens)
        one.flush()
    assert one.stats()["tiers"]["fleet"]["written_payload_bytes"] == 5 * 5_000
    assert reader.load_all(tokens) == (5, 5)


def test_it_works_on_a_real_redis(open_fleet, make_model, redis_url):
    one, two = open_fleet([redis_url]), open_fleet([redis_url])
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 30)
    model.store(tokens)
    one.flush()
    assert reader.load_all(tokens) == (30, 30)


def test_credentials_of_the_directory_are_not_shown(tmp_path):
    config = kvtier.FleetTierConfig(
        path=tmp_path, locations=("redis://me:hunter2@127.0.0.1/0",), key=b"hunter3" * 5
    )
    assert "hunter" not in repr(config)


def test_the_server_forgets_the_oldest_when_it_is_full():
    server = LocationServer(max_entries=3, clock=ManualClock())
    keys = [bytes([n]) * 18 for n in range(5)]
    server.map.publish([(key, b"x") for key in keys], 60)
    assert server.map.lookup(keys) == [None, None, b"x", b"x", b"x"]
    assert server.map.evicted == 2
