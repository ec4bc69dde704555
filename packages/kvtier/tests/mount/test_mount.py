"""Mode shared-fs on files whose locks, links, sizes and open descriptors cannot be relied on."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.errors import ConfigError, StoreFormatError
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.log.liveness import HeartbeatLiveness
from deepinfer_kvtier.testing import FaultIo, ManualClock

FAST = {"poll_s": 0.02, "heartbeat_s": 0.1, "adopt_after_s": 600.0, "listing_s": 3600.0}


class MountIo(FaultIo):
    """A mount: locks are refused, sizes are lies, who holds a file that is gone gets ESTALE."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.calls: Counter[str] = Counter()
        self.order: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}
        self._lies = random.Random(seed)

    def try_lock(self, path, *, create):
        raise OSError(errno.ENOLCK, "this file system has no locks")

    def disk_bytes(self, path):
        return self._lies.randrange(1 << 50)

    def allocate(self, fd, offset, length):
        raise OSError(errno.EOPNOTSUPP, "no preallocation")

    def listdir(self, path):
        self.calls["listdir"] += 1
        return super().listdir(path)

    def create(self, path):
        fd = super().create(path)
        self._paths[fd] = str(path)
        return fd

    def open_read(self, path):
        fd = super().open_read(path)
        self._paths[fd] = str(path)
        return fd

    def preadv(self, fd, buffers, offset):
        path = self._paths.get(fd)
        if path is not None and not os.path.exists(path):
            raise OSError(errno.ESTALE, "the file behind this descriptor is gone")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self.order.append(("write", os.path.basename(self._paths.get(fd, ""))))
        return super().pwritev(fd, buffers, offset)

    def datasync(self, fd):
        self.order.append(("sync", os.path.basename(self._paths.get(fd, ""))))
        super().datasync(fd)


@pytest.fixture(autouse=True)
def no_links(monkeypatch):
    """Hard links and locks of any kind fail in every test here."""

    def refuse(*_args, **_keywords):
        raise OSError(errno.EPERM, "refused by this mount")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("fcntl.flock", refuse)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def open_mount(store):
    opened = []

    def make(clock=None, io=None, **settings):
        usual = {"mount": FAST, "host_bytes": 0, "auto_gc": False, "min_free_share": 0.0}
        settings = {**usual, **settings}
        cache = kvtier.open(
            store, mode="shared-fs", clock=clock, io=io or MountIo(len(opened)), **settings
        )
        opened.append(cache)
        return cache

    yield make
    for cache in opened:
        cache.close()


def eventually(check, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return check()


def test_machines_see_each_others_blocks_without_locks_links_sizes_or_listings(
    open_mount, make_model
):
    one, two = make_model(open_mount()), make_model(open_mount())
    before = two.cache.disk.io.calls["listdir"]
    tokens = one.prompt(1, 6)
    one.store(tokens)
    assert one.cache.flush().done
    assert eventually(lambda: two.block_hits(tokens) == 6)
    assert two.load_all(tokens) == (6, 6)
    assert two.cache.disk.io.calls["listdir"] == before, "found through roster and log alone"
    third = make_model(open_mount())
    assert third.load_all(tokens) == (6, 6), "and by whoever comes later"


def test_no_request_waits_for_the_mount(open_mount, make_model, monkeypatch):
    cache = open_mount(mount={**FAST, "poll_s": 10.0, "heartbeat_s": 10.0})
    model = make_model(cache)
    model.store(model.prompt(1, 2))
    cache.flush()
    monkeypatch.setattr(cache.disk, "refresh", lambda **_: pytest.fail("a lookup read the mount"))
    assert model.block_hits(model.prompt(2, 3)) == 0


def test_bytes_reach_the_server_before_the_index_and_the_index_before_the_ticket(
    open_mount, make_model
):
    io = MountIo()
    model = make_model(open_mount(io=io))
    assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
    steps = [(what, name[:3]) for what, name in io.order if name[:3] in ("seg", "idx")]
    last_data = max(i for i, step in enumerate(steps) if step == ("write", "seg"))
    rest = steps[last_data + 1 :]
    assert rest[:3] == [("sync", "seg"), ("write", "idx"), ("sync", "idx")]


def test_a_deleted_file_outlives_its_tombstone_by_the_grace(open_mount, make_model, store):
    clock = ManualClock()
    one, two = open_mount(clock=clock), open_mount(clock=clock)
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 4)
    model.store(tokens, cls="scratch")
    one.flush()
    assert eventually(lambda: reader.block_hits(tokens) == 4)
    for _ in range(72):
        clock.advance(100)
        one.disk.liveness.beat()
    one.disk.seal()
    assert one.gc().segments_expired == 1
    assert one.gc().segments_expired == 0, "what waits for its grace is not counted again"
    assert len(list(store.glob("w/*/seg-*"))) == 1
    clock.advance(121)
    one.gc()
    assert list(store.glob("w/*/seg-*")) == []
    assert reader.load_all(tokens)[1] == 0


def test_a_file_that_is_gone_is_a_miss_even_under_an_open_descriptor(open_mount, make_model, store):
    one, two = open_mount(), open_mount()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 4)
    model.store(tokens)
    one.flush()
    assert eventually(lambda: reader.block_hits(tokens) == 4)
    with reader.ns.match(tokens, want=("block",)) as match:
        for path in store.glob("w/*/seg-*"):
            path.unlink()
        import numpy as np

        dst = np.zeros((match.n_blocks, 5_000), dtype=np.uint8)
        result = reader.ns.load(match, dst=dst, wait=True).wait()
    assert set(result.blocks) == {kvtier.Status.MISS}
    assert reader.block_hits(tokens) == 0


def test_a_bad_read_of_one_machine_takes_nothing_from_the_others(open_mount, make_model):
    one, two = open_mount(), open_mount()
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 4)
    model.store(tokens)
    one.flush()
    assert eventually(lambda: reader.block_hits(tokens) == 4)
    io = two.disk.io
    with io._lock:
        io._rates = {"preadv": {"flip": 1.0}}
    with reader.ns.match(tokens, want=("block",)) as match:
        import numpy as np

        dst = np.zeros((match.n_blocks, 5_000), dtype=np.uint8)
        result = reader.ns.load(match, dst=dst, wait=True).wait()
        assert reader.check(match, result, dst) < 4
        assert kvtier.Status.CORRUPT in result.blocks
    io.set_rates({})
    two.flush()
    late = make_model(open_mount())
    assert late.load_all(tokens) == (4, 4)


def test_sizes_for_the_quota_come_from_the_index(open_mount, make_model):
    cache = open_mount(quota_bytes=800_000, floor_s=0, segment_bytes=50_000)
    model = make_model(cache)
    for seed in range(40):
        model.store(model.prompt(seed, 3))
        cache.flush()
    report = cache.gc()
    assert report.segments_evicted > 0
    assert report.bytes_left < 2_000_000, "what waits for its grace included"
    assert len(cache.disk.index) > 0, "lies about sizes must not empty the store"


def test_the_mode_is_kept_with_the_store(store, make_model):
    kvtier.open(store, mode="shared-fs", io=MountIo()).close()
    with kvtier.open(store, io=MountIo()) as cache:
        assert cache.disk.liveness.shared
    with pytest.raises(ConfigError, match="'shared-fs'"):
        kvtier.open(store, mode="embedded")


def test_an_embedded_store_is_not_opened_as_a_shared_one(tmp_path, monkeypatch):
    monkeypatch.undo()
    kvtier.open(tmp_path / "s").close()
    with pytest.raises(ConfigError, match="'embedded'"):
        kvtier.open(tmp_path / "s", mode="shared-fs")


def test_many_that_create_a_store_at_once_agree_on_one_identity(store):
    caches, threads = [], []

    def work():
        caches.append(kvtier.open(store, mode="shared-fs", host_bytes=0, io=MountIo()))

    for _ in range(6):
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len({(c.disk.store, c._secret) for c in caches}) == 1
    for cache in caches:
        cache.close()


def test_a_creation_that_was_not_finished_is_said(store, monkeypatch):
    monkeypatch.setattr("deepinfer_kvtier.log.store_files.CLAIM_WAIT_S", 0.1)
    store.mkdir()
    (store / ".FORMAT.json.claim").touch()
    with pytest.raises(StoreFormatError, match=r"remove .*FORMAT.json.claim"):
        kvtier.open(store, mode="shared-fs")


def test_impatient_settings_are_refused(store):
    with pytest.raises(ConfigError, match="adopt_after_s"):
        kvtier.open(store, mode="shared-fs", mount={"adopt_after_s": 20.0})


# -- who lives, who is new


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def machine(tmp_path, clock):
    (tmp_path / "w").mkdir(exist_ok=True)

    def make(own_clock=clock):
        return HeartbeatLiveness(
            tmp_path, PosixIo(), own_clock, dead_after_s=600, grace_s=120, listing_s=30
        )

    return make


def test_a_writer_is_dead_when_its_count_stood_still_by_the_readers_own_clock(machine, clock):
    writer, reader = machine(ManualClock(1.0)), machine()
    name = writer.claim_folder()[1].name
    for _ in range(30):
        with reader.adopting(name) as mine:
            assert not mine
        clock.advance(100)
        writer.beat()
    for _ in range(6):
        with reader.adopting(name) as mine:
            assert not mine
        clock.advance(100)
    with reader.adopting(name) as mine:
        assert mine


def test_only_one_adopts_and_when_it_dies_another_does(machine, clock):
    name = machine(ManualClock()).claim_folder()[1].name
    machines = [machine() for _ in range(5)]

    def adopters():
        won = []
        for m in machines:
            with m.adopting(name) as mine:
                if mine:
                    won.append(m)
        return won

    assert adopters() == []
    clock.advance(601)
    assert len(adopters()) == 1
    assert adopters() == [], "somebody is at it"
    clock.advance(601)
    assert len(adopters()) == 1, "the log has not ended: the adopter died too"


def test_who_was_away_too_long_never_uses_its_folder_again(machine, clock):
    writer = machine()
    path = writer.claim_folder()[1]
    assert not writer.is_fenced()
    clock.advance(301)
    assert writer.is_fenced()
    count = (path / "hb").read_bytes()
    writer.beat()
    assert (path / "hb").read_bytes() == count, "no sign of life for what others may have adopted"
    assert writer.is_fenced()
    assert writer.claim_folder()[1] != path
    assert not writer.is_fenced()


def test_new_writers_are_found_through_the_roster(machine):
    reader, writers = machine(), [machine() for _ in range(5)]
    assert reader.names(listing=True) == []
    names = []
    for writer in writers:
        name = writer.claim_folder()[1].name
        writer.announce(name)
        names.append(name)
        assert reader.names(listing=False) == sorted(names)


def test_a_roster_entry_that_is_not_written_out_yet_is_read_again(machine, tmp_path):
    reader, writer = machine(), machine()
    reader.names(listing=True)
    (tmp_path / "w" / "roster-0").touch()
    name = writer.claim_folder()[1].name
    writer.announce(name)
    assert reader.names(listing=False) == [name]
    (tmp_path / "w" / "roster-0").write_text("ab" * 16)
    assert reader.names(listing=False) == sorted([name, "ab" * 16])


def test_leftovers_go_but_the_newest_number_stays(machine, tmp_path):
    reader, writers = machine(), [machine() for _ in range(3)]
    for writer in writers:
        path = writer.claim_folder()[1]
        writer.announce(path.name)
        (tmp_path / "w" / f"{path.name}.adopt.0").touch()
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    reader.names(listing=True)
    old = sorted(path.name for path in reader.leftovers())
    assert [name for name in old if name.startswith("roster")] == ["roster-0", "roster-1"]
    assert sum(".adopt." in name for name in old) == 3
    for path in reader.leftovers():
        path.unlink()
    last = machine()
    last.announce(last.claim_folder()[1].name)
    assert (tmp_path / "w" / "roster-3").exists()


def test_what_a_dead_machine_left_unindexed_is_adopted(open_mount, make_model, store):
    clock = ManualClock()
    io = MountIo()
    dead = open_mount(clock=clock, io=io)
    model = make_model(dead)
    tokens = model.prompt(1, 4)
    model.store(tokens)
    dead.flush()
    real = dead.disk._writer.log
    dead.disk._writer.log = lambda entries: None
    more = model.prompt(2, 3)
    model.store(more)
    dead.flush()
    dead.disk._writer.log = real
    io.crash()
    heir = open_mount(clock=clock)
    other = make_model(heir)
    assert other.block_hits(more) == 0
    heir.gc()
    clock.advance(601)
    assert heir.gc().adopted_writers == 1
    assert other.load_all(tokens) == (4, 4)
    assert other.load_all(more) == (3, 3)


def test_a_machine_that_was_away_goes_on_in_a_new_folder(open_mount, make_model, store):
    clock = ManualClock()
    settings = {**FAST, "poll_s": 1000.0, "heartbeat_s": 10_000.0, "adopt_after_s": 100_000.0}
    cache = open_mount(clock=clock, mount=settings)
    model = make_model(cache)
    tokens, more = model.prompt(1, 2), model.prompt(2, 2)
    model.store(tokens)
    cache.flush()
    first = cache.disk.writer_name
    clock.advance(60_000)
    model.store(more)
    assert cache.flush().done
    assert cache.disk.writer_name != first
    assert cache.stats()["disk"]["abandoned_writers"] == 1
    late = make_model(open_mount())
    assert late.load_all(more) == (2, 2)


def test_the_command_line_makes_and_reads_a_shared_store(store, capsys):
    from deepinfer_kvtier.ops.cli import main

    def run(*arguments: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["kvtier", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    run("init", str(store), "--mode", "shared-fs")
    cache = kvtier.open(store, io=MountIo())
    assert cache.disk.liveness.shared
    cache.close()
    assert "records" in run("stat", str(store))
    run("gc", str(store))


def test_a_drop_reaches_the_memory_of_other_machines(open_mount, make_model):
    one, two = open_mount(), open_mount(host_bytes=1 << 20)
    model, reader = make_model(one), make_model(two)
    tokens = model.prompt(1, 4)
    model.store(tokens)
    one.flush()
    assert eventually(lambda: reader.block_hits(tokens) == 4)
    assert reader.load_all(tokens) == (4, 4), "now in its memory, too"
    model.ns.drop(model.digests(tokens))
    assert eventually(lambda: reader.block_hits(tokens) == 0)
