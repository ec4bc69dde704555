"""Windows between machines: each cache here is a machine of its own, on loopback."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.base.buffers import checksum_of
from deepinfer_kvtier.base.config import split_address
from deepinfer_kvtier.remote.state_exchange import LocalLocations, WindowRecord, wire
from deepinfer_kvtier.remote.state_exchange.client import PeerClient, PeerHealth
from deepinfer_kvtier.remote.state_exchange.peers import owner
from deepinfer_kvtier.remote.state_exchange.service import WindowService
from deepinfer_kvtier.testing import ManualClock, payload_of

KEY = b"k" * 32


STATE_BYTES = 9_001


SECRET = b"s" * 32


@pytest.fixture
def machine(make_model):
    """Caches that share blocks' identity (the secret) and nothing else; windows stay in memory."""
    opened = []

    def build(directory, clock=None, **settings):
        windows = {"key": KEY, "locations": directory, "deadline_ms": 2000, **settings}
        cache = kvtier.open(
            host_bytes=4 << 20,
            secret=SECRET,
            persist_state=False,
            clock=clock or ManualClock(),
            windows=windows,
        )
        opened.append(cache)
        return make_model(cache)

    yield build
    for cache in opened:
        cache.close()


def state_of(model, tokens, blocks):
    return payload_of(model.digests(tokens)[blocks - 1] + b"s", STATE_BYTES)


def pull(model, tokens, **keywords):
    """(match, load result, window bytes) of a prompt whose blocks are there."""
    with model.ns.match(tokens) as match:
        window = np.zeros(STATE_BYTES, dtype=np.uint8)
        if match.state is None:
            return match, None, window
        job = model.ns.load(match, state_dst=window, wait=True, **keywords)
        return match, job.wait(), window


def pair(machine, tokens, **settings):
    """Two machines with the same blocks; only the first has the window after block 5."""
    directory = LocalLocations()
    one, two = machine(directory, **settings), machine(directory, **settings)
    one.store(tokens, states=(5,))
    two.store(tokens)
    assert one.cache.windows.settle()
    return one, two


HOLDER = textwrap.dedent(
    """
    import sys
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.testing import payload_of

    layout = kvtier.LayoutSpec(128, {
        "block": kvtier.parts(("index", 1000), ("main", 4000)),
        "state": kvtier.parts(("swa", 9001)),
    })
    cache = kvtier.open(
        host_bytes=4 << 20, secret=b"s" * 32, persist_state=False,
        windows={"key": b"k" * 32, "locations": "peers"},
    )
    ns = cache.namespace(layout, model="model", salt="tenant")
    print(cache.windows.address, flush=True)
    members = sys.stdin.readline().split()
    cache.windows.set_members(members)
    hasher = ns.hasher()
    hasher.extend(np.arange(6 * 128 + 5))
    digest = hasher.digests[4]
    ns.put_state(digest, payload_of(digest + b"s", 9001), n_blocks=5)
    print(cache.windows.settle(), flush=True)
    sys.stdin.readline()
    """
)


@contextmanager
def holder_process():
    """Another process that holds the window after block 5 of `arange`; yields (process, join)."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        address = process.stdout.readline().strip()

        def join(*others) -> str:
            process.stdin.write(" ".join([address, *others]) + "\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == "True"
            return address

        yield process, join
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_window_of_another_machine_is_matched_planned_and_loaded(machine, make_model):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    match, result, window = pull(two, tokens)
    assert (match.n_blocks, match.block_prefix) == (5, 6)
    assert (match.state.tier, match.state.n_blocks) == ("peer", 5)
    near = kvtier.Cost(tiers={"host": (0, 1e12), "peer": (0, 1e12)})
    plan = two.ns.plan(match, mode="exact", cost=near)
    assert (plan.n_blocks, plan.state, plan.approximate) == (5, "tier", False)
    assert result.state is kvtier.Status.OK
    assert np.array_equal(window, state_of(one, tokens, 5))
    hits = two.cache.stats()["hits"]
    assert (hits["state_hits_peer"], hits["state_hits_host"]) == (1, 0)
    assert 'kvtier_state_hits_by_tier_total{tier="peer"} 1' in two.cache.metrics()


def test_peers_are_asked_once_and_only_when_state_is_wanted(tmp_path, make_model):
    tokens = np.arange(6 * 128 + 5)
    settings = {"key": KEY, "locations": LocalLocations()}
    with kvtier.open(tmp_path / "kv", persist_state=False, windows=settings) as cache:
        model = make_model(cache)
        model.store(tokens, durability="flushed").wait(60)
        model.ns.match(tokens, want=("block",)).release()
        assert cache.windows.stats().get("lookups", 0) == 0
        model.ns.match(tokens).release()
        assert cache.windows.stats()["lookups"] == 1
        assert "kvtier_window_dead_peers 0" in cache.metrics()


def test_what_was_pulled_is_kept_for_the_next_request(machine):
    tokens = np.arange(6 * 128 + 5)
    _, two = pair(machine, tokens)
    pull(two, tokens)
    match, _, _ = pull(two, tokens)
    assert match.state.tier == "host"
    assert two.cache.windows.stats()["pulls_ok"] == 1


def test_a_copy_lives_only_as_long_as_the_original_would_have(machine):
    tokens = np.arange(6 * 128 + 5)
    clocks = [ManualClock(), ManualClock()]
    directory = LocalLocations()
    one, two = (machine(directory, clock=clock) for clock in clocks)
    one.store(tokens, states=(5,))
    two.store(tokens)
    assert one.cache.windows.settle()
    clocks[0].advance(170)
    assert pull(two, tokens)[1].state is kvtier.Status.OK
    # The pull itself is no use of it here: the copy has ten seconds left, like the original.
    clocks[1].advance(11)
    two.cache.host.expire()
    assert not two.cache.host.contains(1, two.digests(tokens)[4])


def test_a_window_in_use_slides_and_an_unused_one_expires_after_180_seconds(machine):
    clock = ManualClock()
    model = machine(LocalLocations(), clock=clock)
    used, idle = np.arange(300), np.arange(1000, 1300)
    model.store(used, states=(2,))
    model.store(idle, states=(2,))
    for _ in range(3):
        clock.advance(100)
        assert model.ns.match(used).state is not None
        model.cache.host.expire()
    assert model.ns.match(idle).state is None


def test_a_newer_window_of_a_chain_replaces_the_former_after_five_seconds(machine):
    clock = ManualClock()
    model = machine(LocalLocations(), clock=clock)
    tokens = np.arange(6 * 128 + 5)
    model.store(tokens, states=(2,))
    digests = model.digests(tokens)
    model.ns.put_state(digests[4], state_of(model, tokens, 5), n_blocks=5)
    clock.advance(4.9)
    model.cache.windows.retire()
    assert model.cache.host.contains(1, digests[1]), "a retry of the same turn still finds it"
    clock.advance(0.2)
    model.cache.windows.retire()
    assert not model.cache.host.contains(1, digests[1])
    assert model.cache.host.contains(1, digests[4])


def test_a_holder_that_announces_another_size_is_not_believed(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    service = one.cache.windows._service
    hold = service._hold

    def lying(request):
        held = hold(request)
        held.answer = dataclasses.replace(held.answer, nbytes=STATE_BYTES + 1)
        return held

    service._hold = lying
    assert pull(two, tokens)[1].state is kvtier.Status.MISS
    assert two.cache.windows.stats()["client_errors"] == 1


def test_own_announcements_are_no_hints(machine):
    tokens = np.arange(6 * 128 + 5)
    directory = LocalLocations()
    model = machine(directory)
    model.store(tokens, states=(5,))
    assert model.cache.windows.settle()
    digest = model.digests(tokens)[4]
    (hint,) = directory.lookup([digest[:16]])
    model.ns.drop([digest], kinds=("state",))
    assert model.cache.windows.settle()
    directory.publish([hint])
    assert model.ns.match(tokens).state is None


def test_windows_that_are_also_on_disk_are_not_replaced(tmp_path, make_model):
    clock = ManualClock()
    settings = {"key": KEY, "locations": LocalLocations()}
    with kvtier.open(tmp_path / "kv", clock=clock, windows=settings) as cache:
        model = make_model(cache)
        tokens = np.arange(6 * 128 + 5)
        model.store(tokens)
        digests = model.digests(tokens)
        for n in (2, 5):
            model.ns.put_state(digests[n - 1], state_of(model, tokens, n), n_blocks=n)
        clock.advance(6)
        cache.windows.retire()
        assert cache.host.contains(1, digests[1])


def test_a_hint_to_a_window_that_is_gone_costs_one_round_trip(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    one.cache.host.remove(1, one.digests(tokens)[4])
    match, result, _ = pull(two, tokens)
    assert match.state.tier == "peer"
    assert result.state is kvtier.Status.MISS
    assert two.cache.windows.stats()["client_gone"] == 1
    assert two.cache.windows.stats()["dead_peers"] == 0


def test_a_hint_from_before_a_restart_is_stale_not_wrong(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    one.cache.windows.generation += 1
    assert pull(two, tokens)[1].state is kvtier.Status.MISS


def test_a_withdrawn_window_is_not_hinted_at_any_more(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    one.ns.drop(one.digests(tokens)[4:5])
    assert one.cache.windows.settle()
    assert two.ns.match(tokens).state is None


def test_damaged_bytes_are_never_taken(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    record = one.cache.host.peek(1, one.digests(tokens)[4])
    record.checksum = bytes(16)
    _, result, _ = pull(two, tokens)
    assert result.state is kvtier.Status.CORRUPT
    assert two.ns.match(tokens).state.tier == "peer", "nothing damaged was kept"


def test_a_window_of_another_size_is_not_taken(machine):
    tokens = np.arange(6 * 128 + 5)
    directory = LocalLocations()
    one, two = machine(directory), machine(directory)
    one.store(tokens, states=(5,))
    two.store(tokens)
    assert one.cache.windows.settle()
    (hint,) = directory.lookup([one.digests(tokens)[4][:16]])
    with two.ns.match(tokens) as match:
        assert match.state.tier == "peer"
    status, _ = two.cache.windows.pull(hint, one.digests(tokens)[4], [memoryview(bytearray(8))])
    assert status is kvtier.Status.MISS


def test_marks_travel_with_the_window(machine):
    tokens = np.arange(6 * 128 + 5)
    directory = LocalLocations()
    one, two = machine(directory), machine(directory)
    digests = one.digests(tokens)
    payload = state_of(one, tokens, 5)
    one.ns.put_state(digests[4], payload, n_blocks=5, approximate=True, replay_generation=3)
    two.store(tokens)
    assert one.cache.windows.settle()
    assert two.ns.match(tokens, accept_approximate=False).state is None
    match, result, _ = pull(two, tokens)
    assert (match.state.approximate, match.state.replay_generation) == (True, 3)
    assert result.state is kvtier.Status.OK
    kept = two.cache.host.peek(1, digests[4])
    assert (kept.approximate, kept.generation, kept.depth) == (True, 3, 5)


def test_the_byte_cap_holds_for_what_is_pulled_too(machine):
    directory = LocalLocations()
    one, two = machine(directory), machine(directory)
    room = int((4 << 20) * 0.15) // STATE_BYTES
    for seed in range(room + 5):
        tokens = one.prompt(seed, 1)
        one.store(tokens, states=(1,))
        two.store(tokens)
        assert one.cache.windows.settle()
        pull(two, tokens)
    assert two.cache.host.usage()["states"] == room
    assert one.cache.host.usage()["states"] == room


def test_nothing_stays_pinned_at_the_holder(machine):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    pull(two, tokens)
    two.cache.close()
    one.cache.windows.close()
    assert one.cache.host.pins() == 0


def test_a_peer_without_the_key_gets_nothing(machine):
    tokens = np.arange(6 * 128 + 5)
    directory = LocalLocations()
    one, two = machine(directory), machine(directory, key=b"x" * 32)
    one.store(tokens, states=(5,))
    two.store(tokens)
    assert one.cache.windows.settle()
    assert pull(two, tokens)[1].state is kvtier.Status.MISS
    assert one.cache.windows.stats()["served_protocol_errors"] == 1
    assert "served_pulls_served" not in one.cache.windows.stats()


@pytest.mark.parametrize(
    "noise",
    [b"GET / HTTP/1.1\r\n\r\n" * 8, b"\xff" * 4096, wire.MAGIC + bytes(64), b""],
)
def test_a_stranger_on_the_port_is_cut_off_and_others_are_served(machine, noise):
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens)
    host, port = split_address(one.cache.windows.address)
    with socket.create_connection((host, port), timeout=60) as stranger:
        assert len(stranger.recv(64)) == wire.NONCE_BYTES
        stranger.sendall(noise)
        with suppress(OSError):  # it may have been cut off already
            stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert stranger.recv(64) == b""
    assert pull(two, tokens)[1].state is kvtier.Status.OK


def test_a_frame_that_announces_too_much_ends_the_connection(machine):
    tokens = np.arange(6 * 128 + 5)
    one, _ = pair(machine, tokens)
    health = PeerHealth(dead_after=9, retry_s=1, clock=ManualClock())
    client = PeerClient(KEY, health)
    address = one.cache.windows.address
    with pytest.raises(wire.WireError, match="a frame holds"):
        client.call(address, wire.LOOKUP, bytes(wire.MAX_BODY_BYTES + 16), 5.0)
    too_many = bytes((wire.MAX_BODY_BYTES // wire.RECORD_BYTES + 1) * wire.KEY_BYTES)
    with pytest.raises(ConnectionError):
        client.call(address, wire.LOOKUP, too_many, 5.0)
    with pytest.raises(ConnectionError):
        client.call(address, 77, b"", 5.0)
    client.close()


@pytest.mark.parametrize("key", [None, KEY])
def test_silent_connections_do_not_lock_out_the_others(machine, key):
    """Those that never show the key, and those that show it and say nothing more."""
    tokens = np.arange(6 * 128 + 5)
    one, two = pair(machine, tokens, max_connections=2)
    where = split_address(one.cache.windows.address)
    with ExitStack() as stack:
        for _ in range(5):
            silent = stack.enter_context(socket.create_connection(where, timeout=60))
            theirs = silent.recv(wire.NONCE_BYTES, socket.MSG_WAITALL)
            if key is not None:
                mine = wire.new_nonce()
                proof = wire.proof(key, wire.CLIENT, theirs, mine)
                silent.sendall(wire.MAGIC + mine + proof)
                assert len(silent.recv(wire.PROOF_BYTES, socket.MSG_WAITALL)) == wire.PROOF_BYTES
        _, result, window = pull(two, tokens)
        assert result.state is kvtier.Status.OK
        assert np.array_equal(window, state_of(two, tokens, 5))


def test_window_bytes_are_part_of_the_authenticated_frame(machine, monkeypatch):
    """Bytes changed on the way are refused even where their checksum is what was announced."""
    tokens = np.arange(6 * 128 + 5)
    directory = LocalLocations()
    one = machine(directory)
    one.store(tokens, states=(5,))
    assert one.cache.windows.settle()
    sent = state_of(one, tokens, 5)
    changed = sent.copy()
    changed[4_000] ^= 1
    send, pack = WindowService._send_both, wire.PullAnswer.pack

    async def tamper(self, connection, head, window):
        assert bytes(window) == sent.tobytes()
        await send(self, connection, head, changed.data)

    def announce(answer):
        if answer.status == wire.HELD:
            answer = dataclasses.replace(answer, checksum=checksum_of([changed.data]))
        return pack(answer)

    monkeypatch.setattr(WindowService, "_send_both", tamper)
    monkeypatch.setattr(wire.PullAnswer, "pack", announce)
    health = PeerHealth(dead_after=9, retry_s=1, clock=ManualClock())
    client = PeerClient(KEY, health)
    digest = one.digests(tokens)[4]
    (hint,) = directory.lookup([digest[:16]])
    request = wire.PullRequest(digest[:16], digest, hint.generation, 5_000, STATE_BYTES)
    room = memoryview(bytearray(STATE_BYTES))
    status, _ = client.pull(one.cache.windows.address, request, [room], 5.0)
    client.close()
    assert status is kvtier.Status.ERROR
    assert client.counts["errors"] == 1


def test_machines_find_each_other_through_the_directory_they_keep_themselves(machine):
    tokens = np.arange(6 * 128 + 5)
    two = machine("peers")
    two.store(tokens)
    with holder_process() as (_, join):
        address = join(two.cache.windows.address)
        two.cache.windows.set_members([address, two.cache.windows.address])
        match, result, window = pull(two, tokens)
        assert match.state.tier == "peer"
        assert result.state is kvtier.Status.OK
        assert np.array_equal(window, state_of(two, tokens, 5))


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_hung_or_killed_peer_is_left_alone_after_three_tries_and_retried(machine, how):
    tokens = np.arange(6 * 128 + 5)
    clock = ManualClock()
    directory = LocalLocations()
    two = machine(directory, clock=clock, deadline_ms=20)
    two.store(tokens)
    digest = two.digests(tokens)[4]
    with holder_process() as (process, join):
        address = join()
        hint = WindowRecord(digest[:16], b"machine1", 1, 10**9, STATE_BYTES, 0, address)
        directory.publish([hint])
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        # A killed one refuses the connection, which a busy machine may say too late.
        expected = [kvtier.Status.TIMEOUT]
        if how == signal.SIGKILL:
            expected.append(kvtier.Status.MISS)
        for _ in range(3):
            assert pull(two, tokens)[1].state in expected
        tried = two.cache.windows.stats()
        assert tried["dead_peers"] == 1
        assert two.ns.match(tokens).state is None, "its hints are not offered while it is dead"
        clock.advance(31)
        assert pull(two, tokens)[1].state in expected
        assert two.ns.match(tokens).state is None, "one failed retry, and it is left alone again"
        if how == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            clock.advance(31)
            # Alive again: the generation in this hint is made up, which it says.
            two.cache.windows._deadline_s = 5.0
            assert pull(two, tokens)[1].state is kvtier.Status.MISS
            assert two.cache.windows.stats()["dead_peers"] == 0


def test_a_lost_member_loses_hints_only(machine):
    clock = ManualClock()
    two, three = machine("peers", clock=clock), machine("peers", clock=clock)
    addresses = [m.cache.windows.address for m in (two, three)]
    gone = "127.0.0.1:1"
    for m in (two, three):
        m.cache.windows.set_members([*addresses, gone])
    found = 0
    for seed in range(12):
        tokens = two.prompt(seed, 1)
        two.store(tokens, states=(1,))
        three.store(tokens)
        assert two.cache.windows.settle()
        match, result, window = pull(three, tokens)
        at_gone = owner(two.digests(tokens)[0][:16], sorted([*addresses, gone])) == gone
        assert (match.state is None) == at_gone
        if result is not None:
            found += 1
            assert np.array_equal(window, state_of(two, tokens, 1))
    assert 0 < found < 12


def test_a_member_that_cannot_be_told_costs_its_share_and_no_other(machine):
    two, three = machine("peers"), machine("peers")
    members = sorted([m.cache.windows.address for m in (two, three)] + ["127.0.0.1:1"])
    for m in (two, three):
        m.cache.windows.set_members(members)
    made = [
        WindowRecord(
            payload_of(bytes([i]), 16).tobytes(), b"machine1", 1, 60_000, 9, 0, "127.0.0.1:2"
        )
        for i in range(60)
    ]
    keys = [record.key for record in made]
    directory = two.cache.windows._locations
    with pytest.raises(OSError, match="refused"):
        directory.publish(made)
    reachable = [owner(key, members) != "127.0.0.1:1" for key in keys]
    for m in (two, three):
        found = m.cache.windows._locations.lookup(keys, 5.0)
        assert [record is not None for record in found] == reachable
    with pytest.raises(OSError, match="refused"):
        directory.withdraw(keys, b"machine1")
    assert three.cache.windows._locations.lookup(keys, 5.0) == [None] * 60


def test_machines_find_each_other_through_redis(machine, redis_url):
    tokens = np.arange(6 * 128 + 5)
    one, two = (machine("redis", redis_url=redis_url) for _ in range(2))
    one.store(tokens, states=(5,))
    two.store(tokens)
    assert one.cache.windows.settle()
    _, result, window = pull(two, tokens)
    assert result.state is kvtier.Status.OK
    assert np.array_equal(window, state_of(one, tokens, 5))
    two.cache.windows.withdrawn(two.digests(tokens)[4:5])
    assert two.cache.windows.settle()
    three = machine("redis", redis_url=redis_url)
    three.store(tokens)
    assert three.ns.match(tokens).state is not None, "only the holder withdraws its record"
    one.cache.windows.withdrawn(one.digests(tokens)[4:5])
    assert one.cache.windows.settle()
    assert three.ns.match(tokens).state is None


def test_a_redis_that_is_not_there_means_no_hints(machine):
    pytest.importorskip("redis", reason="the extra [redis] is not installed")
    tokens = np.arange(6 * 128 + 5)
    model = machine("redis", redis_url="redis://127.0.0.1:1")
    model.store(tokens, states=(5,))
    assert model.ns.match(tokens).state.tier == "host"
    assert model.cache.windows.settle()
    assert model.cache.windows.stats()["announce_errors"] == 1
    assert model.cache.windows.stats()["lookup_errors"] == 1
