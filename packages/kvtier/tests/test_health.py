"""Health says what is wrong, and tickets why a record is not stored."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.files import PosixIo


def reasons(cache):
    stats = cache.stats()
    assert stats["health"] == ("degraded" if stats["health_reasons"] else "ok")
    return stats["health_reasons"]


@pytest.mark.parametrize("operation", ["pwritev", "create", "mkdir"])
def test_a_full_disk_or_no_more_inodes(store, make_model, monkeypatch, operation):
    with kvtier.open(store, commit_delay_s=0.0, gc_interval_s=3600) as cache:
        model = make_model(cache)
        assert reasons(cache) == []

        def full(self, *arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(PosixIo, operation, full)
            ticket = model.store(model.prompt(1, 3), durability="flushed")
            assert not ticket.wait(30)
            assert set(ticket.reasons) == {"disk_full"}
            assert "disk_full" in reasons(cache)
        assert model.store(model.prompt(2, 3), durability="flushed").wait(30)
        assert reasons(cache) == []


@pytest.mark.parametrize("what", ["secret given", "secret damaged", "id damaged"])
def test_a_wrong_secret_or_id_is_found_and_nothing_is_stored_under_it(store, make_model, what):
    with kvtier.open(store, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 3), durability="flushed").wait(20)
    settings = {}
    if what == "secret given":
        settings = {"secret": bytes(32)}
    elif what == "secret damaged":
        raw = bytearray((store / "SECRET").read_bytes())
        raw[7] ^= 1
        (store / "SECRET").write_bytes(raw)
    else:
        content = json.loads((store / "FORMAT.json").read_text())
        content["store"] = ("1" if content["store"][0] == "0" else "0") + content["store"][1:]
        (store / "FORMAT.json").write_text(json.dumps(content))
    with kvtier.open(store, host_bytes=1 << 20, **settings) as cache:
        assert "wrong_secret" in reasons(cache)
        model = make_model(cache)
        ticket = model.store(model.prompt(1, 3), durability="flushed")
        ticket.wait(20)
        assert ticket.reasons == ("wrong_secret",) * 3
        assert model.load_all(model.prompt(1, 3)) == (3, 3), "memory serves"


def test_the_right_secret_is_no_complaint(store, make_model):
    for _ in range(2):
        with kvtier.open(store) as cache:
            assert reasons(cache) == []


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_whose_bits_flip_is_noticed(store, make_model, persistent):
    with kvtier.open(store if persistent else None, host_bytes=64 << 20) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 200)
        model.store(tokens).wait(20)
        cache.flush()
        with model.ns.match(tokens, want=("block",)) as match:
            for record in match.records():
                record.data[77] ^= 1
            room = np.zeros((match.n_blocks, 5_000), np.uint8)
            model.ns.load(match, dst=room, wait=True).wait()
        assert "memory_corrupt" in reasons(cache)


def test_work_that_fails_in_ways_nobody_thought_of_does_not_end_the_writing(store, make_model):
    with kvtier.open(store, gc_interval_s=0.01) as cache:
        cache.queue._maintain = lambda: 1 / 0
        model = make_model(cache)
        for seed in range(3):
            assert model.store(model.prompt(seed, 2), durability="flushed").wait(20)
