"""Segment files that are gone: told from deleted ones, counted, and not looked for again."""

from __future__ import annotations

import pytest

import deepinfer_kvtier as kvtier


@pytest.fixture(params=["embedded", "shared-fs"])
def any_store(request, tmp_path):
    kvtier.init(tmp_path / "store", mode=request.param, min_free_share=0.0)
    return tmp_path / "store"


def fill(store, make_model, seeds, **settings):
    """Two blocks for each seed, a segment for each opening."""
    for seed in seeds:
        with kvtier.open(store, host_bytes=0, **settings) as cache:
            model = make_model(cache)
            assert model.store(model.prompt(seed, 2), durability="flushed").wait(60)


def segment_files(store):
    return sorted(store.rglob("*.kvs"), key=lambda path: path.stat().st_mtime_ns)


def test_a_lost_segment_is_reported_with_its_records_and_repaired(any_store, make_model, cli):
    fill(any_store, make_model, (1, 2, 3))
    segment_files(any_store)[1].unlink()
    found = cli.run("fsck", any_store)
    assert found.returncode == 1
    assert "lost_segments     1" in found.stdout
    facts = cli.facts("fsck", any_store, "--repair")
    assert (facts["lost_segments"], facts["lost_records"], facts["checked"]) == (1, 2, 4)
    assert facts["bad"] == {}
    again = cli.facts("fsck", any_store)
    assert (again["lost_segments"], again["lost_records"]) == (0, 0)
    with kvtier.open(any_store, host_bytes=0) as cache:
        model = make_model(cache)
        assert [model.load_all(model.prompt(seed, 2)) for seed in (1, 2, 3)] == [
            (2, 2),
            (0, 0),
            (2, 2),
        ]


def test_what_is_stored_elsewhere_or_was_dropped_is_not_lost(any_store, make_model, cli):
    with (
        kvtier.open(any_store, host_bytes=0) as one,
        kvtier.open(any_store, host_bytes=0, mount={"poll_s": 60.0}) as two,
    ):
        models = [make_model(cache) for cache in (one, two)]
        tokens = models[0].prompt(1, 3)
        digests = models[0].digests(tokens)
        for cache, model in zip((one, two), models, strict=True):
            cache.disk.refresh = lambda **_: None  # neither knows that the other is at it
            model.store(tokens[: 2 * 128 + 1] if cache is two else tokens)
            assert cache.flush().done
        models[0].ns.drop(digests[:1])
        assert one.flush().done
        (first,) = one.disk.root.glob(f"w/{one.disk.writer_name}/*.kvs")
    first.unlink()
    facts = cli.facts("fsck", any_store, "--repair")
    assert (facts["lost_segments"], facts["lost_records"]) == (1, 1)


@pytest.mark.parametrize("collections", [1, 2, 3])
def test_a_collected_segment_is_not_lost_even_when_its_tombstones_writer_is_gone(
    any_store, make_model, cli, collections
):
    """The folder of the command that collected is removed by a later collection."""
    fill(any_store, make_model, (1, 2))
    with kvtier.open(any_store, host_bytes=0) as cache:
        model = make_model(cache)
        model.ns.drop(model.digests(model.prompt(1, 2)))
        model.store(model.prompt(3, 2), durability="flushed").wait(60)
    for _ in range(collections):
        with kvtier.open(any_store, host_bytes=0, mount={"grace_s": 0.0}) as cache:
            cache.gc()
    assert len(segment_files(any_store)) == 2
    facts = cli.facts("fsck", any_store)
    assert (facts["lost_segments"], facts["checked"]) == (0, 4)


def test_a_tombstone_of_a_living_writers_segment_outlives_who_wrote_it(store, make_model, cli):
    with kvtier.open(store, host_bytes=0, segment_bytes=1 << 14) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 4), durability="flushed").wait(60)
        assert len(segment_files(store)) == 4
        with kvtier.open(store, host_bytes=0) as other:
            make_model(other).ns.drop(model.digests(model.prompt(1, 4))[:2])
            assert other.gc().segments_expired == 2
        cache.gc()
        cache.gc()
        assert len(list(store.glob("w/*"))) == 1, "the collector's folder is gone"
        assert cli.facts("fsck", store)["lost_segments"] == 0
