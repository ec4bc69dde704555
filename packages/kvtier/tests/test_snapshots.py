"""Snapshots shorten the way to the index; whatever happens to them, the same records are found."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log import format as fmt
from deepinfer_kvtier.log import writer
from deepinfer_kvtier.log.index import LogIndex
from deepinfer_kvtier.log.log_reader import Snapshot, compact, read_newest, write_snapshot
from deepinfer_kvtier.log.segments import SegmentSet
from deepinfer_kvtier.ops.check import check
from deepinfer_kvtier.testing import FaultIo

STORE, WRITER = b"s" * 16, b"w" * 16


@pytest.fixture
def eager(monkeypatch):
    """A snapshot every four frames."""
    monkeypatch.setattr(writer, "_SNAPSHOT_FRAMES", 4)
    monkeypatch.setattr(writer, "_LAST_SNAPSHOT_FRAMES", 4)


def commits(cache, model, count, first=0):
    """Prompts stored in a commit and a sync each."""
    prompts = [model.prompt(seed, 2) for seed in range(first, first + count)]
    for tokens in prompts:
        assert model.store(tokens, durability="fsync").wait(60)
    return prompts


def found(store, make_model, prompts):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        hits = [model.load_all(tokens) for tokens in prompts]
        return hits, cache.stats()["disk"]


def all_of(prompts):
    return [(2, 2)] * len(prompts)


def test_a_store_opens_from_its_newest_snapshot(store, make_model, eager):
    with kvtier.open(store) as cache:
        prompts = commits(cache, make_model(cache), 24)
    (log,) = store.glob("w/*/idx-0.kvx")
    snapshots = sorted(path.name for path in store.glob("w/*/snap-*"))
    assert len(snapshots) == 2
    assert log.stat().st_blocks * 512 < log.stat().st_size / 2, "the old part of the log is gone"
    hits, disk = found(store, make_model, prompts)
    assert hits == all_of(prompts)
    assert (disk["duplicate_entries"], disk["bad_snapshots"], disk["index_rescans"]) == (0, 0, 0)


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "missing"])
@pytest.mark.parametrize("which", ["newest", "both"])
def test_a_damaged_snapshot_is_ignored(store, make_model, eager, how, which):
    with kvtier.open(store) as cache:
        prompts = commits(cache, make_model(cache), 24)
    snapshots = sorted(store.glob("w/*/snap-*"), key=lambda path: int(path.stem[5:]))
    for path in snapshots[-1:] if which == "newest" else snapshots:
        raw = bytearray(path.read_bytes())
        if how == "flip":
            raw[4096 + 70] ^= 1
        path.write_bytes({"flip": raw, "cut": raw[:-64], "empty": b""}.get(how, b""))
        if how == "missing":
            path.unlink()
    hits, disk = found(store, make_model, prompts)
    assert hits == all_of(prompts)
    assert disk["index_rescans"] == (which == "both")
    assert disk["bad_snapshots"] == (0 if how == "missing" else 1 if which == "newest" else 2)


def test_a_process_that_slept_through_two_snapshots_misses_nothing(store, make_model, eager):
    with kvtier.open(store) as one, kvtier.open(store, host_bytes=0) as other:
        first = commits(one, make_model(one), 3)
        watching = make_model(other)
        assert [watching.load_all(tokens) for tokens in first] == all_of(first)
        later = commits(one, make_model(one), 60, first=100)
        assert [watching.load_all(tokens) for tokens in first + later] == all_of(first + later)
        assert other.stats()["disk"]["duplicate_entries"] == 0


def test_what_was_dropped_stays_dropped(store, make_model, eager):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        prompts = commits(cache, model, 20)
        for tokens in prompts[::2]:
            model.ns.drop(model.digests(tokens))
        prompts += commits(cache, model, 20, first=50)
    hits, _ = found(store, make_model, prompts)
    assert hits == [(0, 0), (2, 2)] * 10 + all_of(prompts[20:])


def test_records_that_other_processes_dropped_stay_dropped(store, make_model, eager):
    with kvtier.open(store) as one, kvtier.open(store) as other:
        prompts = commits(one, make_model(one), 20)
        model = make_model(other)
        for tokens in prompts:
            assert model.ns.drop(model.digests(tokens)) in (0, 2)
            assert model.block_hits(tokens) == 0
        commits(other, model, 20, first=50)
        commits(one, make_model(one), 20, first=90)
    hits, _ = found(store, make_model, prompts)
    assert hits == [(0, 0)] * 20


@pytest.mark.parametrize("step", range(4, 90, 11))
def test_a_process_that_dies_anywhere_loses_nothing_it_had_promised(store, make_model, eager, step):
    io = FaultIo(step, crash_at=step)
    promised = []
    cache = kvtier.open(store, io=io, gc_interval_s=1e9)
    model = make_model(cache)
    for seed in range(12):
        tokens = model.prompt(seed, 2)
        if io.dead:
            break
        if model.store(tokens, durability="fsync").wait(1):
            promised.append(tokens)
    io.crash()
    with kvtier.open(store, host_bytes=0) as survivor:
        survivor.gc()
        model = make_model(survivor)
        assert [model.load_all(tokens) for tokens in promised] == all_of(promised)
    cache.close(timeout=0)


def test_a_file_system_that_cannot_take_snapshots_keeps_its_log(store, make_model, eager):
    io = FaultIo(1, {"rename": {"eio": 1.0}})
    with kvtier.open(store, io=io) as cache:
        prompts = commits(cache, make_model(cache), 12)
    assert not list(store.glob("w/*/snap-*"))
    hits, _ = found(store, make_model, prompts)
    assert hits == all_of(prompts)


def entry(flags, lo, segment=0, page=1, seconds=100, kind=0):
    made = np.zeros(1, dtype=fmt.ENTRY)
    made["key_lo"], made["key_hi"], made["flags"], made["segment"] = lo, 7, flags, segment
    made["page"], made["created_s"], made["length"], made["kind"] = page, seconds, 10, kind
    return made


ENTRIES = st.lists(
    st.builds(
        entry,
        st.sampled_from([0, 0, 0, fmt.FLAG_TOMB_KEY, fmt.FLAG_TOUCH, fmt.FLAG_SEAL]),
        st.integers(0, 5),
        segment=st.integers(0, 3),
        page=st.integers(1, 4),
        seconds=st.integers(100, 105),
        kind=st.integers(0, 1),
    ),
    max_size=30,
)


@given(ENTRIES)
def test_a_compacted_log_means_what_the_log_meant(tmp_path_factory, entries):
    root = tmp_path_factory.mktemp("root", numbered=True)
    folder = root / "w" / WRITER.hex()
    folder.mkdir(parents=True)
    for number in (0, 1, 3):
        (folder / f"seg-chat-0-{number}.kvs").touch()
    whole = np.concatenate([np.zeros(0, dtype=fmt.ENTRY), *entries])

    def meaning(log):
        index = LogIndex(SegmentSet(root, PosixIo(), {}))
        index.apply([(WRITER, log)])
        return {(int(r["key_lo"]), int(r["kind"])): int(r["seen_s"]) for r in index.rows()}

    assert meaning(compact(whole, {0, 1, 3})) == meaning(whole)
    shutil.rmtree(root)


def test_a_compacted_log_holds_no_record_that_its_own_tombstone_hides():
    log = [entry(0, 1), entry(0, 2), entry(fmt.FLAG_TOMB_KEY, 1, seconds=101)]
    flags = compact(np.concatenate(log), {0})["flags"]
    assert sorted(flags.tolist()) == [0, fmt.FLAG_TOMB_KEY]


def test_a_snapshot_reads_back_what_was_written(tmp_path):
    io = PosixIo()
    for count in (0, 1, 1000):
        entries = np.concatenate([entry(0, i) for i in range(count)] or [entry(0, 0)[:0]])
        write_snapshot(tmp_path, Snapshot(count, 9, entries), STORE, WRITER, io)
        snapshot, damaged = read_newest(tmp_path, STORE, WRITER, io)
        assert (snapshot.number, snapshot.next_frame, damaged) == (count, 9, 0)
        assert np.array_equal(snapshot.entries, entries)
    assert read_newest(tmp_path, STORE, WRITER, io, beyond=9) == (None, 0)
    assert read_newest(tmp_path, STORE, b"x" * 16, io) == (None, 3), "another writer's file"


@pytest.mark.parametrize("which", ["newest", "both"])
def test_fsck_finds_damaged_snapshots_and_a_repair_leaves_none(store, make_model, eager, which):
    with kvtier.open(store) as cache:
        prompts = commits(cache, make_model(cache), 24)
    snapshots = sorted(store.glob("w/*/snap-*"), key=lambda path: int(path.stem[5:]))
    damaged = snapshots[-1:] if which == "newest" else snapshots
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-1])
    with kvtier.open(store, host_bytes=0) as cache:
        report = check(cache.disk, repair=False)
        assert (report.bad_snapshots, report.clean) == (len(damaged), False)
        assert check(cache.disk, repair=True).bad_snapshots == len(damaged)
    with kvtier.open(store, host_bytes=0) as cache:
        assert check(cache.disk, repair=False).clean
        assert cache.stats()["disk"]["index_rescans"] == 0
    hits, _ = found(store, make_model, prompts)
    assert hits == all_of(prompts)
