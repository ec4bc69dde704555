"""Other tenants, other users, other hands in the folder, and arguments of the wrong kind."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.log.log_reader import LogReader

from .conftest import BLOCK_BYTES


def test_a_match_is_of_use_to_its_namespace_only(store, make_model):
    with kvtier.open(store) as cache:
        mine, other = make_model(cache, salt="a"), make_model(cache, salt="b")
        tokens = mine.prompt(1, 3)
        mine.store(tokens).wait(20)
        with mine.ns.match(tokens, want=("block",)) as match:
            room = np.zeros((match.n_blocks, BLOCK_BYTES), np.uint8)
            for use in (lambda: other.ns.load(match, dst=room), lambda: other.ns.plan(match)):
                with pytest.raises(kvtier.ConfigError, match="another namespace"):
                    use()
            assert not room.any()
            again = make_model(cache, salt="a")
            assert again.ns.load(match, dst=room, wait=True).wait().ok


def test_a_part_of_a_chain_knows_where_it_begins(store, make_model):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 8)
        whole = model.ns.match(tokens).digests
        room = np.zeros((4, BLOCK_BYTES), np.uint8)
        assert model.ns.put(whole[:4], room).wait(20)
        cache.flush()
        for part in (whole[4:], whole[2:][2:], model.digests(tokens)[4:]):
            assert (part.first_block, part.before) == (4, whole[3])
        assert model.ns.put(whole[4:], room, durability="flushed").wait(20)
        rows = cache.disk.index.probe(0, 0, whole)
        assert rows["depth"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
        assert not hasattr(whole[::2], "first_block")


def test_what_a_hasher_adds_is_put_where_it_belongs(store, make_model):
    """A growing conversation is put by what each `extend` returned: not as chains of their own."""
    with kvtier.open(store) as cache:
        ns = make_model(cache).ns
        hasher = ns.hasher()
        first = hasher.extend(range(300))
        second = hasher.extend(range(300, 700))
        for part in (first, second):
            assert all(ns.put(part, bytes(len(part) * BLOCK_BYTES)).accepted)
        records = [cache.host.peek(0, digest) for digest in (*first, *second)]
        assert [record.depth for record in records] == [1, 2, 3, 4, 5]
        assert [record.parent for record in records] == [ns.root, *first, *second][:5]


WRONG = {
    "match tokens": lambda ns, m: ns.match(None),
    "match text": lambda ns, m: ns.match("hello"),
    "match media": lambda ns, m: ns.match([1] * 300, media=[1]),
    "match want": lambda ns, m: ns.match([1] * 300, want=5),
    "match lease": lambda ns, m: ns.match([1] * 300, lease_s="60"),
    "match max_blocks": lambda ns, m: ns.match([1] * 300, max_blocks="2"),
    "match digests": lambda ns, m: ns.match([1] * 300, digests=3),
    "load match": lambda ns, m: ns.load(None),
    "load blocks": lambda ns, m: ns.load(m, blocks=3, dst=bytearray(0)),
    "load dst": lambda ns, m: ns.load(m, dst=object()),
    "load parts": lambda ns, m: ns.load(m, dst=bytearray(0), parts=5),
    "load deadline": lambda ns, m: ns.load(m, dst=bytearray(0), deadline_ms="5"),
    "load priority": lambda ns, m: ns.load(m, dst=bytearray(0), priority=1.5),
    "plan": lambda ns, m: ns.plan("match"),
    "put digests": lambda ns, m: ns.put(None, b""),
    "put text": lambda ns, m: ns.put("ab", b""),
    "put src": lambda ns, m: ns.put(m.digests[:1], None),
    "put parents": lambda ns, m: ns.put(m.digests[:1], bytes(BLOCK_BYTES), parents=5),
    "put first": lambda ns, m: ns.put(m.digests[:1], bytes(BLOCK_BYTES), first_block="0"),
    "put cls": lambda ns, m: ns.put(m.digests[:1], bytes(BLOCK_BYTES), cls=["chat"]),
    "put durability": lambda ns, m: ns.put(m.digests[:1], bytes(BLOCK_BYTES), durability=None),
    "put confirmed": lambda ns, m: ns.put(
        m.digests[:1], bytes(BLOCK_BYTES), confirmed_tokens="128"
    ),
    "put generation": lambda ns, m: ns.put(
        m.digests[:1], bytes(BLOCK_BYTES), replay_generation="1"
    ),
    "state digest": lambda ns, m: ns.put_state(7, bytes(9_001)),
    "state blocks": lambda ns, m: ns.put_state(m.digests[0], bytes(9_001), n_blocks="1"),
    "drop": lambda ns, m: ns.drop(5),
    "drop kinds": lambda ns, m: ns.drop(m.digests, kinds=7),
    "layout": lambda ns, m: ns.cache.namespace({"block": 5}, model="m"),
    "model": lambda ns, m: ns.cache.namespace(ns.layout, model=7),
    "adapters": lambda ns, m: ns.cache.namespace(ns.layout, model="m", adapters=[5]),
    "shard": lambda ns, m: ns.cache.namespace(ns.layout, model="m", shard=3),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_arguments_of_the_wrong_kind_are_errors_of_this_package(make_model, call):
    with kvtier.open(host_bytes=1 << 20) as cache:
        model = make_model(cache)
        with (
            model.ns.match(model.prompt(1, 3)) as match,
            pytest.raises(kvtier.KVTierError),
        ):
            call(model.ns, match)


ANYTHING = (
    None, 5, -1, 1.5, "abc", b"xx", [], {}, object(), float("nan"), [None], [1, "a"],
    np.array([1.0]), (1, 2), True,
)  # fmt: skip
ANYWHERE = {
    "tokens": lambda ns, m, x: ns.match(x),
    "media": lambda ns, m, x: ns.match([1] * 300, media=x),
    "want": lambda ns, m, x: ns.match([1], want=x),
    "lease": lambda ns, m, x: ns.match([1], lease_s=x),
    "max blocks": lambda ns, m, x: ns.match([1], max_blocks=x),
    "known digests": lambda ns, m, x: ns.match([1] * 300, digests=x),
    "digests": lambda ns, m, x: ns.put(x, bytes(BLOCK_BYTES)),
    "src": lambda ns, m, x: ns.put(m.digests[:1], x),
    "parents": lambda ns, m, x: ns.put(m.digests[:1], bytes(BLOCK_BYTES), parents=x),
    "first block": lambda ns, m, x: ns.put(m.digests[:1], bytes(BLOCK_BYTES), first_block=x),
    "confirmed": lambda ns, m, x: ns.put(m.digests[:1], bytes(BLOCK_BYTES), confirmed_tokens=x),
    "state": lambda ns, m, x: ns.put_state(m.digests[0], x),
    "state parent": lambda ns, m, x: ns.put_state(m.digests[0], bytes(9_001), parent=x),
    "match": lambda ns, m, x: ns.load(x),
    "dst": lambda ns, m, x: ns.load(m, dst=x),
    "state dst": lambda ns, m, x: ns.load(m, state_dst=x),
    "deadline": lambda ns, m, x: ns.load(m, dst=bytearray(0), deadline_ms=x),
    "priority": lambda ns, m, x: ns.load(m, dst=bytearray(0), priority=x),
    "drop": lambda ns, m, x: ns.drop(x),
    "kinds": lambda ns, m, x: ns.drop(m.digests, kinds=x),
    "plan": lambda ns, m, x: ns.plan(x),
    "cost": lambda ns, m, x: ns.plan(m, cost=x),
    "mode": lambda ns, m, x: ns.plan(m, mode=x),
    "renew": lambda ns, m, x: m.renew(x),
    "flush": lambda ns, m, x: ns.cache.flush(x),
    "layout": lambda ns, m, x: ns.cache.namespace(x, model="m"),
    "layout kinds": lambda ns, m, x: kvtier.LayoutSpec(128, x),
    "kind": lambda ns, m, x: kvtier.LayoutSpec(128, {"block": x}),
    "part": lambda ns, m, x: kvtier.parts(x),
    "part bytes": lambda ns, m, x: kvtier.parts(("a", x)),
    "extend": lambda ns, m, x: ns.hasher().extend(x),
    "extend media": lambda ns, m, x: ns.hasher().extend([1] * 300, x),
    "tiers": lambda ns, m, x: kvtier.open(tiers=x).close(),
} | {
    name: lambda ns, m, x, name=name: ns.cache.namespace(ns.layout, **{"model": "m", name: x})
    for name in (
        "model", "salt", "adapters", "quantisation", "rope", "numerics", "shard", "tables",
        "encryption_key",
    )
}  # fmt: skip


@pytest.mark.parametrize("call", ANYWHERE.values(), ids=ANYWHERE)
def test_whatever_is_given_is_taken_or_an_error_of_this_package(make_model, call):
    with kvtier.open(host_bytes=1 << 20) as cache:
        model = make_model(cache)
        with model.ns.match(model.prompt(1, 3)) as match:
            for value in ANYTHING:
                with contextlib.suppress(kvtier.KVTierError):
                    call(model.ns, match, value)


def test_one_unreadable_writer_costs_its_records_only(store, make_model, monkeypatch):
    for seed in (1, 2):
        with kvtier.open(store, host_bytes=0) as cache:
            model = make_model(cache)
            assert model.store(model.prompt(seed, 3), durability="flushed").wait(20)
    first = min((store / "w").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    poll = LogReader.poll

    def denied(self):
        if self.folder == first:
            raise PermissionError(13, "denied")
        return poll(self)

    monkeypatch.setattr(LogReader, "poll", denied)
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        assert sum(model.block_hits(model.prompt(seed, 3)) for seed in (1, 2)) == 3
        assert cache.gc() is not None
        assert "unreadable_writers" in cache.stats()["health_reasons"]


def test_files_have_the_permissions_that_were_asked_for(tmp_path, make_model):
    group = os.getgid()
    with kvtier.open(
        tmp_path / "s", file_mode=0o660, group=group, quota_bytes=1 << 30, min_free_share=0.0
    ) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
        seen = 0
        for path in (tmp_path / "s").rglob("*"):
            mode = stat.S_IMODE(path.stat().st_mode)
            wanted = 0o770 if path.is_dir() else 0o660
            assert mode == wanted, f"{path} has {mode:o}"
            seen += 1
        assert seen > 8
        assert "open_to_others" not in cache.stats()["health_reasons"]


def test_private_is_the_default_and_what_others_may_read_is_said(store, make_model, caplog):
    assert stat.S_IMODE((store / "SECRET").stat().st_mode) == 0o600
    (store / "SECRET").chmod(0o644)
    with kvtier.open(store) as cache:
        assert "open_to_others" in cache.stats()["health_reasons"]
    assert "others may read the secret" in caplog.text


def test_a_folder_that_anybody_may_write_to_is_refused(store):
    store.chmod(0o777)
    with pytest.raises(kvtier.ConfigError, match="anybody may write"):
        kvtier.open(store)
    with kvtier.open(store, file_mode=0o666):
        pass


@pytest.mark.parametrize("settings", [{"file_mode": 0o777}, {"group": "no-such-group"}])
def test_permissions_that_cannot_be_are_refused(tmp_path, settings):
    with pytest.raises(kvtier.ConfigError):
        kvtier.open(tmp_path / "s", **settings)


@pytest.mark.parametrize("what", ["root", "w", "writer", "segments"])
def test_collection_survives_that_folders_disappear(store, make_model, what):
    with kvtier.open(store, host_bytes=1 << 20) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
        paths = {
            "root": [store],
            "w": [store / "w"],
            "writer": list((store / "w").iterdir()),
            "segments": list(store.rglob("*.kvs")),
        }[what]
        for path in paths:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        assert cache.gc() is not None
        assert ("folder_gone" in cache.stats()["health_reasons"]) == (what == "root")
        assert model.load_all(model.prompt(1, 3)) == (3, 3), "memory serves"


def test_collection_survives_a_neighbour_that_deletes_meanwhile(store, make_model, monkeypatch):
    from deepinfer_kvtier.base.files import PosixIo

    for seed in range(3):
        with kvtier.open(store, host_bytes=0) as cache:
            model = make_model(cache)
            assert model.store(model.prompt(seed, 3), durability="flushed").wait(20)
    with kvtier.open(store, host_bytes=0) as cache:
        listdir = PosixIo.listdir
        gone = []

        def racing(self, path):
            names = listdir(self, path)
            if path.name == "w" and not gone:
                gone.append(path / names[0])
                shutil.rmtree(gone[0])
            return names

        monkeypatch.setattr(PosixIo, "listdir", racing)
        assert cache.gc() is not None
        assert gone


def test_the_command_fails_on_a_namespace_that_is_not_there(store, make_model, cli):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
        name = model.ns.id
    for command in (
        ["drop", store, "--namespace", "00000000", "--yes"],
        ["pin", store, "--namespace", "00000000"],
    ):
        done = cli.run(*command)
        assert done.returncode == 2
        assert name[:8] in done.stderr, "it says which there are"
    done = cli.run("pin", store, "--namespace", name)
    assert "moved" in done.stdout


def test_the_command_says_which_namespace_a_tenant_has(store, make_model, cli, tmp_path):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
        name = model.ns.id
    layout = tmp_path / "layout.json"
    layout.write_text(
        '{"block_tokens": 128, "block": {"index": 1000, "main": 4000}, "state": {"swa": 9001}}'
    )
    arguments = ["--model", "model", "--layout", layout, "--salt", "tenant"]
    facts = cli.facts("namespace", store, *arguments)
    assert facts == {"namespace": name[:8], "id": name, "records": 3}
    layout.write_text("{}")
    assert cli.run("namespace", store, *arguments).returncode == 2


def test_a_state_slot_may_stay_in_memory_where_others_are_stored(store, make_model):
    with kvtier.open(store, host_bytes=1 << 20) as cache:
        model = make_model(cache)
        digests = model.digests(model.prompt(1, 3))
        room = np.zeros(9_001, np.uint8)
        assert model.ns.put_state(digests[0], room, n_blocks=1, persist=False).wait(20)
        assert model.ns.put_state(digests[1], room, n_blocks=2).wait(20)
        assert cache.flush().done
        rows = cache.disk.index.probe(1, 0, digests)
        assert (rows["length"] == 9_001).tolist() == [False, True, False]
        assert cache.stats()["host"]["states"] == 2
