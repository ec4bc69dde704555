"""A wall clock that jumps deletes nothing: ages pass with the monotonic clock."""

from __future__ import annotations

import json

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock

DAY_S = 86_400.0


class Jumping(ManualClock):
    """A machine whose wall clock is set by hand."""

    off_s = 0.0

    def wall(self):
        return super().wall() + self.off_s


@pytest.fixture
def clock():
    return Jumping()


def fill(store, clock, make_model, **settings):
    with kvtier.open(store, clock=clock, host_bytes=0, **settings) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 4), cls="agent", durability="flushed").wait(20)


@pytest.mark.parametrize("jump_days", [-400, -3, 3, 400])
def test_a_jump_while_a_process_lives_deletes_nothing(store, clock, make_model, jump_days):
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.store(model.prompt(1, 4), cls="scratch", durability="flushed").wait(20)
        clock.off_s = jump_days * DAY_S
        cache.gc()
        assert model.block_hits(model.prompt(1, 4)) == 4
        assert "clock_jump" in cache.stats()["health_reasons"]
        assert model.store(model.prompt(2, 4), cls="scratch", durability="flushed").wait(20)
        clock.advance(1_800)
        cache.gc()
        assert model.block_hits(model.prompt(2, 4)) == 4
        clock.advance(3_600)
        cache.disk.seal()
        cache.gc()
        assert model.block_hits(model.prompt(2, 4)) == 0, "time passes all the same"


@pytest.mark.parametrize("jump_days", [-400, 3, 400])
def test_a_jump_between_two_openings_is_reported_and_deletes_nothing(
    store, clock, make_model, jump_days, caplog
):
    fill(store, clock, make_model)
    clock.advance(3_600)
    clock.off_s = jump_days * DAY_S
    for _ in range(3):  # one opening after another comes to the same
        with kvtier.open(store, clock=clock, host_bytes=0) as cache:
            model = make_model(cache)
            cache.gc()
            assert model.block_hits(model.prompt(1, 4)) == 4
            assert "clock_jump" in cache.stats()["health_reasons"]
    assert "records are not aged by that" in caplog.text


def test_after_a_restart_of_the_machine_at_most_a_day_is_believed(store, clock, make_model):
    fill(store, clock, make_model)
    path = store / "clock.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "boot": "another"}))
    clock.off_s = 30 * DAY_S
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        cache.gc()
        model = make_model(cache)
        assert model.block_hits(model.prompt(1, 4)) == 4
        assert cache.stats()["disk"]["clock_jump_s"] == pytest.approx(29 * DAY_S, abs=120)


def test_time_that_really_passed_counts(store, clock, make_model):
    fill(store, clock, make_model)
    clock.advance(4 * DAY_S)
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        cache.gc()
        assert make_model(cache).block_hits(make_model(cache).prompt(1, 4)) == 0
        assert not cache.stats()["disk"]["clock_jump_s"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"boot": 1}', b"\xff" * 100])
def test_a_damaged_note_of_the_time_is_no_note(store, clock, make_model, content):
    fill(store, clock, make_model)
    (store / "clock.json").write_bytes(content)
    with kvtier.open(store, clock=clock, host_bytes=0) as cache:
        model = make_model(cache)
        assert model.block_hits(model.prompt(1, 4)) == 4
