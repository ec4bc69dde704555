from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import ManualClock, payload_of

BLOCK_BYTES = 5_000


STATE_BYTES = 9_001


def test_a_reopened_directory_hits_what_was_flushed(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 9)
        assert model.store(tokens, states=(9,), durability="flushed").wait(60)
        cache.flush()
    with kvtier.open(store) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens)
        assert match.n_blocks == 9
        assert [span.tier for span in match.spans] == ["disk"]
        assert model.load_all(tokens) == (9, 9)
        # Loaded records are in memory now.
        assert [span.tier for span in model.ns.match(tokens).spans] == ["host"]


def test_another_secret_reads_nothing(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store, secret=bytes(range(32))) as cache:
        assert make_model(cache).block_hits(tokens) == 0


def test_the_secret_is_readable_by_its_owner_only(store):
    kvtier.open(store).close()
    assert (store / "SECRET").stat().st_mode & 0o777 == 0o600
    assert len((store / "SECRET").read_bytes()) == 32


def test_a_secret_that_is_missing_is_asked_for_and_not_made_up(tmp_path, make_model, cli):
    store = tmp_path / "store"
    secret = bytes(range(32))
    with kvtier.open(store, secret=secret) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, durability="flushed").wait(60)
    with pytest.raises(kvtier.ConfigError, match="pass `secret`"):
        kvtier.open(store)
    for work in (("gc", store), ("fsck", store, "--repair"), ("stat", store)):
        assert cli.run(*work).returncode == 0
    assert not (store / "SECRET").exists()
    with kvtier.open(store, secret=secret) as cache:
        assert make_model(cache).block_hits(tokens) == 3


def test_a_directory_whose_creation_was_cut_short_gets_its_secret(tmp_path, make_model):
    store = tmp_path / "store"
    kvtier.open(store).close()
    (store / "SECRET").unlink()
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store) as cache:
        assert make_model(cache).block_hits(tokens) == 3


def test_unconfirmed_tokens_are_never_stored(model):
    tokens = model.prompt(1, 4)
    ticket = model.store(tokens, confirmed_tokens=2 * 128 + 127)
    assert ticket.reasons == (None, None, "unconfirmed", "unconfirmed")
    assert ticket.accepted == (True, True, False, False)
    assert model.block_hits(tokens) == 2
    digests = model.digests(tokens)
    state = payload_of(digests[3], STATE_BYTES)
    refused = model.ns.put_state(digests[3], state, n_blocks=4, confirmed_tokens=511)
    assert refused.reasons == ("unconfirmed",)
    taken = model.ns.put_state(digests[3], state, n_blocks=4, confirmed_tokens=512)
    assert taken.accepted == (True,)


def test_confirmed_tokens_count_from_the_start_of_the_chain(model):
    tokens = model.prompt(1, 4)
    model.store(tokens[: 2 * 128])
    ticket = model.store(tokens, first=2, confirmed_tokens=3 * 128)
    assert ticket.reasons == (None, "unconfirmed")


def test_a_source_that_was_copied_may_be_overwritten_at_once(model):
    tokens = model.prompt(1, 3)
    digests = model.digests(tokens)
    source = np.stack([payload_of(d, BLOCK_BYTES) for d in digests])
    ticket = model.ns.put(digests, source, copy=True)
    assert ticket.done
    source[:] = 0
    model.cache.flush()
    assert model.load_all(tokens) == (3, 3)


def test_without_copy_the_ticket_says_when_the_source_is_free(model):
    tokens = model.prompt(1, 3)
    digests = model.digests(tokens)
    source = np.stack([payload_of(d, BLOCK_BYTES) for d in digests])
    ticket = model.ns.put(digests, source, copy=False)
    assert ticket.wait(60)
    source[:] = 0
    assert model.load_all(tokens) == (3, 3)


def test_a_slice_of_the_prefix_can_be_loaded(model):
    tokens = model.prompt(1, 5)
    model.store(tokens)
    match = model.ns.match(tokens, want=("block",))
    dst = np.zeros((2, BLOCK_BYTES), np.uint8)
    result = model.ns.load(match, blocks=slice(3, 5), dst=dst).wait()
    assert model.check(match, result, dst, first=3) == 2


def test_progress_of_a_load_is_visible_block_by_block(model):
    tokens = model.prompt(1, 3)
    model.store(tokens)
    match = model.ns.match(tokens, want=("block",))
    job = model.ns.load(match, dst=np.zeros((3, BLOCK_BYTES), np.uint8))
    job.wait()
    assert job.done
    assert [job.ready(i) for i in range(3)] == [True, True, True]
    assert job.result is not None
    assert job.result.ok_prefix == 3


def test_a_deadline_in_the_past_loads_nothing_and_says_so(model):
    tokens = model.prompt(1, 3)
    model.store(tokens)
    match = model.ns.match(tokens, want=("block",))
    dst = np.full((3, BLOCK_BYTES), 7, np.uint8)
    result = model.ns.load(match, dst=dst, deadline_ms=0).wait()
    assert set(result.blocks) == {kvtier.Status.TIMEOUT}
    assert result.ok_prefix == 0
    assert (dst == 7).all()


def test_dropped_records_are_gone_everywhere_and_stay_gone(store, make_model):
    with kvtier.open(store) as cache, kvtier.open(store) as other:
        model, neighbour = make_model(cache), make_model(other)
        tokens = model.prompt(1, 4)
        model.store(tokens, durability="flushed").wait(60)
        assert neighbour.load_all(tokens) == (4, 4)
        assert model.ns.drop(model.digests(tokens)[2:]) == 2
        assert model.block_hits(tokens) == 2
        other.gc()
        assert neighbour.block_hits(tokens) == 2
    with kvtier.open(store) as cache:
        assert make_model(cache).block_hits(tokens) == 2


def test_dropping_one_kind_leaves_the_other_also_after_a_restart(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        model.store(tokens, states=(2,), durability="flushed").wait(60)
        assert model.ns.drop(model.digests(tokens), kinds=("state",)) == 1
        assert model.ns.match(tokens).block_prefix == 2
    with kvtier.open(store) as cache:
        match = make_model(cache).ns.match(tokens)
        assert (match.block_prefix, match.state) == (2, None)


def test_a_record_can_come_back_after_a_drop(store, make_model):
    clock = ManualClock()
    with kvtier.open(store, clock=clock) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        for _ in range(3):
            assert model.store(tokens, durability="flushed").wait(60)
            assert model.block_hits(tokens) == 2
            model.ns.drop(model.digests(tokens))
            assert model.block_hits(tokens) == 0
        assert model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store, clock=clock) as cache:
        assert make_model(cache).load_all(tokens) == (2, 2)


def test_drop_reaches_records_that_still_wait_for_the_directory(store, make_model):
    with kvtier.open(store, commit_delay_s=30) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        ticket = model.store(tokens, durability="flushed")
        model.ns.drop(model.digests(tokens))
        cache.flush()
        assert not ticket.wait(60)
        assert model.block_hits(tokens) == 0
    with kvtier.open(store) as cache:
        assert make_model(cache).block_hits(tokens) == 0


def test_two_readers_of_one_prefix_share_its_physical_reads(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 40)
        model.store(tokens, durability="flushed").wait(60)
    with kvtier.open(store, io_threads=8) as cache:
        model = make_model(cache)
        match = model.ns.match(tokens, want=("block",))
        rooms = [np.zeros((40, BLOCK_BYTES), np.uint8) for _ in range(8)]
        jobs = [model.ns.load(match, dst=room) for room in rooms]
        for job, room in zip(jobs, rooms, strict=True):
            assert model.check(match, job.wait(), room) == 40
        assert cache.stats()["disk"]["read_records"] == 40


def test_memory_only_caches_work_and_promise_no_persistence(make_model, check_leaks):
    with kvtier.open(host_bytes=1 << 20) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        assert model.store(tokens).wait(1)
        assert model.load_all(tokens) == (3, 3)
        digest = model.digests(model.prompt(2, 1))[0]
        ticket = model.ns.put([digest], payload_of(digest, BLOCK_BYTES), durability="flushed")
        assert ticket.reasons == ("not_persistent",)
        check_leaks(cache)


def test_state_stays_in_memory_when_told_so_and_expires_there(store, make_model):
    clock = ManualClock()
    with kvtier.open(store, persist_state=False, clock=clock, state_ttl_s=180) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 2)
        model.store(tokens, states=(2,), durability="flushed").wait(60)
        assert model.ns.match(tokens).n_blocks == 2
        clock.advance(179)
        assert model.ns.match(tokens).n_blocks == 2
        clock.advance(179)
        cache.host.expire()
        assert model.ns.match(tokens).n_blocks == 2
        clock.advance(181)
        cache.leases.expire()
        cache.host.expire()
        assert model.ns.match(tokens).n_blocks == 0
    with kvtier.open(store) as cache:
        assert make_model(cache).ns.match(tokens).state is None


def test_approximate_records_are_marked_and_can_be_refused(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4)
        model.store(tokens[: 2 * 128])
        model.store(tokens, first=2, approximate=True, replay_generation=3)
        cache.flush()
    with kvtier.open(store) as cache:
        model = make_model(cache)
        for _ in range(2):  # from disk, then from memory
            match = model.ns.match(tokens, want=("block",))
            assert (match.n_blocks, match.approximate, match.replay_generation) == (4, True, 3)
            assert model.block_hits(tokens, accept_approximate=False) == 2
            model.load_all(tokens)


def test_asyncio_callers_get_results_and_tickets(model):
    tokens = model.prompt(1, 3)
    digests = model.digests(tokens)
    source = [payload_of(d, BLOCK_BYTES) for d in digests]

    async def turn() -> kvtier.LoadResult:
        ticket = await model.ns.aput(digests, source, durability="flushed")
        assert ticket.stored == (True, True, True)
        match = model.ns.match(tokens, want=("block",))
        return await model.ns.aload(match, dst=np.zeros((3, BLOCK_BYTES), np.uint8))

    assert asyncio.run(turn()).ok


def test_a_read_only_cache_looks_but_never_writes(store, make_model):
    with kvtier.open(store) as cache:
        tokens = make_model(cache).prompt(1, 2)
        make_model(cache).store(tokens, durability="flushed").wait(60)
    before = sorted(p.name for p in store.rglob("*"))
    with kvtier.open(store, read_only=True) as cache:
        model = make_model(cache)
        assert model.load_all(tokens) == (2, 2)
        ticket = model.store(model.prompt(2, 1))
        assert ticket.reasons == ("read_only",)
    assert sorted(p.name for p in store.rglob("*")) == before


def test_misuse_is_refused_with_a_reason(cache, model, store):
    digest = bytes(32)
    block = bytes(BLOCK_BYTES)
    with pytest.raises(kvtier.ConfigError, match="unknown class"):
        model.ns.put([digest], block, cls="vip")
    with pytest.raises(kvtier.BufferShapeError, match="5000 bytes, got 4999"):
        model.ns.put([digest], block[:-1])
    with pytest.raises(kvtier.ConfigError, match="pass parents"):
        model.ns.put([digest], block, first_block=3)
    for wrong in (digest[:16], "x" * 32, b""):
        with pytest.raises(kvtier.ConfigError, match="a digest is 32 bytes"):
            model.ns.put([wrong], block)
        with pytest.raises(kvtier.ConfigError, match="a digest is 32 bytes"):
            model.ns.put_state(wrong, bytes(STATE_BYTES))
        with pytest.raises(kvtier.ConfigError, match="a digest is 32 bytes"):
            model.ns.drop([wrong])
    with pytest.raises(kvtier.ConfigError, match="kinds are"):
        model.ns.drop([digest], kinds=("window",))
    with pytest.raises(kvtier.ConfigError, match="mode is"):
        model.ns.plan(model.ns.match([1] * 200), mode="guess")
    with pytest.raises(kvtier.ConfigError, match="needs Part"):
        kvtier.LayoutSpec(128, {"block": [("kv", 0, 5)]})
    with pytest.raises(kvtier.ConfigError, match="durability"):
        model.ns.put([digest], block, durability="forever")
    with pytest.raises(kvtier.ConfigError, match="got -1"):
        model.ns.match([-1] * 200)
    with pytest.raises(kvtier.ConfigError, match="want"):
        model.ns.match([1], want=("state",))
    match = model.ns.match([1] * 200)
    with pytest.raises(kvtier.ConfigError, match="no state slot"):
        model.ns.load(match, state_dst=bytearray(STATE_BYTES))
    with pytest.raises(kvtier.BufferShapeError, match="pass dst"):
        model.ns.load(match, blocks=slice(0, 1))
    with pytest.raises(kvtier.ConfigError, match="host_bytes"):
        kvtier.open(host_bytes=-1)
    with pytest.raises(kvtier.ConfigError, match="Extra inputs"):
        kvtier.open(store, hostbytes=1)
    with pytest.raises(kvtier.ConfigError, match="no cache at"):
        kvtier.open(store / "elsewhere", read_only=True)
    with (
        kvtier.open(allow_shared_scope=False) as strict,
        pytest.raises(kvtier.ConfigError, match="salt"),
    ):
        strict.namespace(model.layout, model="m")


def test_a_closed_cache_says_so(store, make_model):
    cache = kvtier.open(store)
    model = make_model(cache)
    cache.close()
    cache.close()
    with pytest.raises(kvtier.ClosedError):
        model.ns.match([1, 2, 3])


def test_a_store_of_another_format_is_refused(store):
    kvtier.open(store).close()
    content = (store / "FORMAT.json").read_text().replace('"format": 1', '"format": 99')
    (store / "FORMAT.json").write_text(content)
    with pytest.raises(kvtier.StoreFormatError, match="version 99"):
        kvtier.open(store)
    (store / "FORMAT.json").write_text("{}")
    with pytest.raises(kvtier.StoreFormatError, match="damaged"):
        kvtier.open(store)


def test_many_threads_put_match_and_load_at_once(cache, model, check_leaks):
    failures: list[BaseException] = []

    def worker(seed: int) -> None:
        try:
            for turn in range(6):
                tokens = model.prompt(seed % 3, 3 + turn)
                model.store(tokens, states=(2,))
                matched, good = model.load_all(tokens)
                assert good == matched >= 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check_leaks(cache)


class SkewedClock(ManualClock):
    """Another machine's, or this one's before somebody set it."""

    off_s = 0.0

    def wall(self):
        return super().wall() + self.off_s


def skewed(store, make_model, off_s):
    clock = SkewedClock()
    clock.off_s = off_s
    cache = kvtier.open(store, clock=clock, host_bytes=0, auto_gc=False)
    return cache, make_model(cache), clock


@pytest.mark.parametrize("off_s", [-0.25, -2.0, -86_400.0])
def test_a_drop_forgets_what_was_stored_by_a_clock_ahead_and_what_is_put_later_counts(
    store, make_model, off_s
):
    ahead, other, _ = skewed(store, make_model, 0.5)
    tokens = other.prompt(1, 4)
    assert other.store(tokens, durability="flushed").wait(60)
    behind, model, _ = skewed(store, make_model, 0.5 + off_s)
    with ahead, behind:
        assert model.block_hits(tokens) == 4
        assert model.ns.drop(model.digests(tokens)) == 4
        assert model.block_hits(tokens) == 0
        ahead.gc()
        assert other.block_hits(tokens) == 0
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.block_hits(tokens) == 4
    with kvtier.open(store, host_bytes=0) as later:
        assert make_model(later).block_hits(tokens) == 4


def test_what_is_put_after_a_drop_by_a_clock_ahead_is_found(store, make_model):
    ahead, other, _ = skewed(store, make_model, 3_600)
    here, model, _ = skewed(store, make_model, 0)
    with ahead, here:
        tokens = model.prompt(1, 4)
        assert model.store(tokens, durability="flushed").wait(60)
        ahead.gc()
        assert other.ns.drop(other.digests(tokens)) == 4
        here.gc()
        assert model.block_hits(tokens) == 0
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.block_hits(tokens) == 4


def test_a_drop_after_the_clock_was_set_back_forgets(store, make_model):
    cache, model, clock = skewed(store, make_model, 0)
    with cache:
        tokens = model.prompt(1, 4)
        assert model.store(tokens, durability="flushed").wait(60)
        clock.off_s = -3_600
        assert model.ns.drop(model.digests(tokens)) == 4
        assert model.block_hits(tokens) == 0
        assert model.store(tokens, durability="flushed").wait(60)
        assert model.block_hits(tokens) == 4
