"""What nobody means to pass is refused with a typed error, and never ends a thread."""

from __future__ import annotations

import errno
import json
import os

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo
from deepinfer_kvtier.simulation.trace import read_trace
from deepinfer_kvtier.testing import ManualClock


@pytest.mark.parametrize("salt", [0, 5, True, None, ["a"], "\ud800"])
def test_a_salt_that_is_no_text_is_refused_and_never_becomes_another_scope(model, salt):
    with pytest.raises(kvtier.ConfigError, match="salt"):
        model.cache.namespace(model.layout, model="model", salt=salt)


@pytest.mark.parametrize("model_id", ["\ud800", {"id": "\udfff"}])
def test_a_model_name_that_is_no_unicode_is_refused(model, model_id):
    with pytest.raises(kvtier.ConfigError, match="plain JSON"):
        model.cache.namespace(model.layout, model=model_id, salt="tenant")


@pytest.mark.parametrize("depth", [(1 << 32) - 1, 1 << 32, 1 << 70])
def test_positions_beyond_the_format_are_refused_and_writing_goes_on(model, depth):
    digests = model.digests(model.prompt(1, 3))
    with pytest.raises(kvtier.ConfigError, match="at most"):
        model.ns.put(digests[1:], bytes(10_000), parents=digests[0], first_block=depth)
    with pytest.raises(kvtier.ConfigError, match="at most"):
        model.ns.put_state(digests[0], bytes(9_001), n_blocks=depth + 1)
    with pytest.raises(kvtier.ConfigError, match="at most"):
        model.ns.put_state(digests[0], bytes(9_001), n_blocks=-1)
    assert model.store(model.prompt(1, 3), durability="flushed").wait(60)


def test_the_last_position_of_the_format_is_stored(model):
    digests = model.digests(model.prompt(1, 3))
    last = (1 << 32) - 3
    ticket = model.ns.put(
        digests[1:], bytes(10_000), parents=digests[0], first_block=last, durability="flushed"
    )
    assert ticket.wait(60)
    assert all(ticket.stored)


def test_tokens_that_are_no_flat_list_are_refused(model):
    with pytest.raises(kvtier.ConfigError, match="flat"):
        model.ns.match([[1], [2, 3]])


def test_a_lease_of_no_number_is_refused(model):
    with pytest.raises(kvtier.ConfigError, match="lease_s"):
        model.ns.match(range(300), lease_s=float("nan"))


def test_a_block_has_a_whole_number_of_tokens():
    with pytest.raises(kvtier.ConfigError, match="whole number"):
        kvtier.LayoutSpec(1.5, {"block": kvtier.parts(("kv", 8))})


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_a_path_that_names_no_directory_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvtier.ConfigError, match="path"):
        kvtier.open(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["FORMAT.json", "policy.json"])
@pytest.mark.parametrize("text", ["[" * 60_000, '{"format": 1e999, "quota_bytes": 1e999}'])
def test_hostile_json_in_the_directory_is_a_format_error(store, name, text):
    (store / name).write_text(text)
    with pytest.raises(kvtier.StoreFormatError, match=name):
        kvtier.open(store)


def test_a_pipe_in_place_of_a_segment_is_a_miss(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, durability="flushed").wait(60)
    (segment,) = store.glob("w/*/*.kvs")
    segment.unlink()
    os.mkfifo(segment)
    with kvtier.open(store) as cache:
        assert make_model(cache).load_all(tokens)[1] == 0


def test_deep_json_in_a_trace_is_one_line_of_an_error(tmp_path, cli):
    trace = tmp_path / "trace.jsonl"
    for text in ("[" * 60_000, '{"timestamp": 0, "input_length": 1e999, "hash_ids": []}'):
        trace.write_text(text)
        result = cli.run("simulate", "--trace", trace, "--capacity", "10")
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
        assert "line 1" in result.stderr


GOOD = {"timestamp": 5, "input_length": 600, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"timestamp": "noon"},
        {"timestamp": float("nan")},
        {"timestamp": float("inf")},
        {"timestamp": True},
        {"timestamp": 10**400},
        {"input_length": -1},
        {"input_length": 600.5},
        {"input_length": None},
        {"hash_ids": "12"},
        {"hash_ids": [1, 2.5]},
        {"hash_ids": {"1": 2}},
        {"hash_ids": [1, [2]]},
        {"hash_ids": [1, 2, 3, 4]},
        {"input_length": 0},
    ],
    ids=repr,
)
def test_a_broken_request_in_a_trace_is_named(tmp_path, cli, wrong):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **wrong}) + "\n")
    done = cli.run("simulate", "--trace", trace)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "line 2" in done.stderr or "blocks of the trace are not of 512 tokens" in done.stderr


def test_traces_that_are_no_traces_are_one_line_of_an_error(tmp_path, cli):
    trace = tmp_path / "trace.jsonl"
    for content, why in (
        (b"", "no request"),
        (b"\n \n", "no request"),
        (b"\xff\xfe\x00", "line 1"),
        (b"null\n", "line 1"),
        (b"[]\n", "line 1"),
        (json.dumps(GOOD).encode() + b"\x00\n", "line 1"),
    ):
        trace.write_bytes(content)
        done = cli.run("simulate", "--trace", trace, "--capacity", "10")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), content
        assert why in done.stderr
    assert "cannot read" in cli.run("simulate", "--trace", tmp_path).stderr


def test_requests_out_of_order_are_put_in_order(tmp_path):
    trace = tmp_path / "trace.jsonl"
    later = {**GOOD, "timestamp": 9, "hash_ids": [1]}
    trace.write_text(f"{json.dumps(later)}\n{json.dumps(GOOD)}\n")
    assert [request.at_s for request in read_trace(trace)] == [0.005, 0.009]


@pytest.mark.parametrize("start_s", [-5e8, 0.0, 2.0**32 - 10, 5e9, 1e18])
@pytest.mark.parametrize("mode", ["embedded", "shared-fs"])
def test_a_machine_that_believes_in_another_century_stores_and_finds(
    tmp_path, make_model, start_s, mode
):
    clock = ManualClock(start_s)
    store = tmp_path / "store"
    with kvtier.open(store, clock=clock, mode=mode, host_bytes=0, min_free_share=0.0) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        assert model.store(tokens, states=(2,), durability="flushed").wait(60)
        clock.advance(86_400)
        assert model.load_all(tokens) == (3, 3)
        cache.gc()
        assert model.ns.drop(model.digests(tokens)[2:]) == 1
    with kvtier.open(store, clock=ManualClock(start_s), read_only=True) as cache:
        assert make_model(cache).block_hits(tokens) == 2


class OutOfDescriptors(PosixIo):
    """Opens no segment for reading while `code` is set."""

    code = 0

    def open_read(self, path):
        if self.code and path.suffix == ".kvs":
            raise OSError(self.code, os.strerror(self.code))
        return super().open_read(path)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_segment_that_cannot_be_opened_for_a_while_is_not_forgotten(store, make_model, code):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        assert model.store(tokens, durability="flushed").wait(60)
    io = OutOfDescriptors()
    with kvtier.open(store, io=io, host_bytes=0) as cache:
        model = make_model(cache)
        io.code = code
        assert model.load_all(tokens) == (0, 0)
        io.code = 0
        assert model.load_all(tokens) == (3, 3)
