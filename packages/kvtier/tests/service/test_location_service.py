from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_kvtier.base.errors import ConfigError
from deepinfer_kvtier.remote.location import messages, server, wire
from deepinfer_kvtier.remote.location.client import LocationClient
from deepinfer_kvtier.remote.location.search import prefix_length
from deepinfer_kvtier.remote.location.server import LocationServer, ShardMap
from deepinfer_kvtier.testing import ManualClock, payload_of

KEY = b"k" * 32


def keys_of(n: int, start: int = 0) -> list[bytes]:
    return [
        messages.key_of(payload_of(i.to_bytes(4, "little"), 32).tobytes(), 0, 0)
        for i in range(start, start + n)
    ]


def items_of(keys: list[bytes]) -> list[tuple[bytes, bytes]]:
    return [(key, b"at " + key[:4]) for key in keys]


@pytest.fixture(params=["tcp", "redis"])
def directory(request, serve, connect):
    """A client of three TCP shards, or of a real Redis server."""
    if request.param == "tcp":
        return connect(*(serve(key=KEY).url for _ in range(3)), key=KEY)
    return connect(request.getfixturevalue("redis_url"))


def test_what_is_published_is_found_and_what_is_retracted_is_not(directory):
    keys = keys_of(100)
    directory.publish(items_of(keys[:60]), ttl_s=60)
    assert directory.lookup(keys) == [v for _, v in items_of(keys[:60])] + [None] * 40
    directory.retract(keys[:10])
    assert directory.lookup(keys[:20]) == [None] * 10 + [v for _, v in items_of(keys[10:20])]
    directory.retract(keys)


def test_six_hundred_blocks_take_two_rounds_and_forty_eight_keys(directory):
    keys = keys_of(600, start=1000)
    directory.publish(items_of(keys[:431]), ttl_s=60)
    assert directory.search(keys) == 431
    assert directory.counts["search_rounds"] == 2
    assert directory.counts["search_keys"] <= 48
    directory.retract(keys)


@given(length=st.integers(0, 600), data=st.data())
def test_the_search_finds_any_prefix_in_two_rounds(length, data):
    stored = data.draw(st.integers(0, length))
    rounds: list[int] = []

    def present(depths):
        assert list(depths) == sorted(set(depths))
        rounds.append(len(depths))
        return [depth <= stored for depth in depths]

    assert prefix_length(length, present) == stored
    assert len(rounds) <= 2
    assert sum(rounds) <= 48


@given(st.integers(601, 15_624), st.data())
def test_fifteen_thousand_blocks_take_three_rounds(length, data):
    stored = data.draw(st.integers(0, length))
    rounds: list[int] = []

    def present(depths):
        rounds.append(len(depths))
        return [depth <= stored for depth in depths]

    assert prefix_length(length, present) == stored
    assert len(rounds) <= 3


@given(st.integers(1, 300), st.randoms())
def test_the_search_ends_and_stays_in_range_whatever_it_is_told(length, rng):
    found = prefix_length(length, lambda depths: [rng.random() < 0.5 for _ in depths])
    assert 0 <= found <= length


def test_keys_spread_evenly_and_stay_where_they_are_when_a_shard_joins(connect):
    keys = keys_of(6000)
    three = connect(*(f"tcp://127.0.0.1:{9000 + i}" for i in range(3)))
    four = connect(*(f"tcp://127.0.0.1:{9000 + i}" for i in range(4)))
    before, after = three.shard_of(keys), four.shard_of(keys)
    counts = np.bincount(before, minlength=3)
    assert counts.min() > 1800
    moved = before != after
    assert (after[moved] == 3).all(), "keys move to the new shard only"
    assert 0.2 < moved.mean() < 0.3


def test_the_latest_publication_wins_and_old_ones_expire(serve, connect, clock):
    served = serve(clock=clock)
    client = connect(served.url)
    (key,) = keys_of(1)
    client.publish([(key, b"old")], ttl_s=10)
    client.publish([(key, b"new")], ttl_s=100)
    clock.advance(50)
    assert client.lookup([key]) == [b"new"]
    clock.advance(50)
    assert client.lookup([key]) == [None]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.integers(0, 9), st.integers(1, 5)),
            st.tuples(st.just("retract"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("wait"), st.integers(1, 3), st.just(0)),
        ),
        max_size=40,
    )
)
def test_a_shard_never_answers_with_more_than_it_was_told(steps):
    clock = ManualClock()
    shard = ShardMap(5, clock)
    oracle: dict[bytes, tuple[float, bytes]] = {}
    for what, number, ttl in steps:
        key = bytes([number]) * 18
        if what == "publish":
            value = bytes([ttl])
            shard.publish([(key, value)], ttl)
            oracle[key] = (clock.monotonic() + ttl, value)
        elif what == "retract":
            shard.retract([key])
            oracle.pop(key, None)
        else:
            clock.advance(number)
        assert len(shard) <= 5
        for n in range(10):
            (found,) = shard.lookup([bytes([n]) * 18])
            until, value = oracle.get(bytes([n]) * 18, (0.0, b""))
            assert found is None or (found == value and until > clock.monotonic())


def test_a_client_without_the_shared_key_gets_nothing(serve, connect):
    served = serve(key=KEY)
    right, wrong = connect(served.url, key=KEY), connect(served.url, key=b"x" * 32)
    (key,) = keys_of(1)
    right.publish([(key, b"value")], ttl_s=60)
    wrong.publish([(key, b"poison")], ttl_s=60)
    assert wrong.lookup([key]) == [None]
    assert right.lookup([key]) == [b"value"]
    assert served.server.counts["protocol_errors"] >= 1


def test_a_service_that_does_not_hold_the_key_is_not_believed(serve, connect):
    served = serve(key=b"")
    client = connect(served.url, key=KEY)
    assert client.lookup(keys_of(1)) == [None]
    assert client.counts["failed_requests"] == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        bytes(16) + bytes(32),
        struct.pack("<I", 0xFFFFFFFF) + bytes(100),
    ],
)
def test_rubbish_ends_its_own_connection_only(serve, connect, raw):
    served = serve(key=KEY)
    client = connect(served.url, key=KEY)
    (key,) = keys_of(1)
    client.publish([(key, b"value")], ttl_s=60)
    with socket.create_connection((served.host, served.port)) as bad:
        bad.sendall(raw)
        bad.shutdown(socket.SHUT_WR)
        bad.settimeout(60)
        while bad.recv(4096):
            pass
    assert client.lookup([key]) == [b"value"]


@pytest.mark.parametrize("shows_key", [False, True])
def test_silent_connections_do_not_lock_out_the_others(serve, connect, monkeypatch, shows_key):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4)
    served = serve(key=KEY)
    (key,) = keys_of(1)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            if shows_key:
                channel = served.run(wire.connect(served.host, served.port, KEY))
                stack.callback(served.loop.call_soon_threadsafe, channel.close)
            else:
                silent = socket.create_connection((served.host, served.port), timeout=60)
                stack.enter_context(silent)
                assert silent.recv(len(wire.MAGIC)) == wire.MAGIC
        client = connect(served.url, key=KEY)
        client.publish([(key, b"value")], ttl_s=60)
        assert client.lookup([key]) == [b"value"]
    assert client.counts["failed_requests"] == 0
    assert served.server.counts["ousted_connections"] == 7


@pytest.mark.parametrize("spoil", ["tag", "replay", "length"])
def test_a_frame_that_was_tampered_with_is_refused(serve, spoil):
    served = serve(key=KEY)

    async def attack() -> bytes:
        channel = await wire.connect(served.host, served.port, KEY)
        keys = messages.pack_keys(keys_of(2))
        frames: list[bytes] = []
        write = channel._writer.write
        channel._writer.write = frames.append
        await channel.send(wire.LOOKUP, 1, keys)
        frame = bytearray(frames[0])
        if spoil == "tag":
            frame[20] ^= 1
        if spoil == "length":
            frame[:4] = (wire.MAX_FRAME_BYTES + 1).to_bytes(4, "little")
        write(bytes(frame))
        if spoil == "replay":
            _, number, _ = await channel.receive()
            assert number == 1
            write(bytes(frame))
        rest = await channel._reader.read()
        channel.close()
        return rest

    assert served.run(attack()) == b""
    assert served.server.counts["protocol_errors"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        struct.pack("<H", 2) + bytes(18),
        struct.pack("<H", 5000) + bytes(5000 * 18),
        struct.pack("<H", 1) + bytes(19),
    ],
)
def test_a_list_of_keys_that_does_not_add_up_is_refused(body):
    with pytest.raises(wire.WireError):
        messages.parse_keys(memoryview(body))


@given(st.binary(max_size=200))
def test_no_bytes_break_a_parser(raw):
    for parse in (
        lambda b: messages.parse_keys(b),
        lambda b: messages.parse_items(b),
        lambda b: messages.parse_values(b, 3),
    ):
        try:
            parse(memoryview(raw))
        except wire.WireError:
            continue


@given(
    st.lists(st.tuples(st.binary(min_size=18, max_size=18), st.binary(min_size=1, max_size=64))),
    st.integers(0, 2**32 - 1),
)
def test_messages_survive_the_wire(items, ttl_s):
    assert messages.parse_items(memoryview(messages.pack_items(items, ttl_s))) == (items, ttl_s)
    keys = [key for key, _ in items]
    assert messages.parse_keys(memoryview(messages.pack_keys(keys))) == keys
    values = [*(value for _, value in items), None]
    raw = memoryview(messages.pack_values(values))
    assert messages.parse_values(raw, len(values)) == values


def test_listening_to_the_network_needs_a_shared_key():
    import asyncio

    with pytest.raises(ConfigError, match="key"):
        asyncio.run(LocationServer().start("0.0.0.0", 0))


def test_asking_another_machine_needs_a_shared_key(clock):
    with pytest.raises(ConfigError, match="set `key`"):
        LocationClient(["tcp://198.51.100.7:7420"], key=b"", prefix=b"", clock=clock)


def test_a_refused_connection_is_a_miss_and_counts_towards_the_pause(connect, clock):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = connect(f"tcp://127.0.0.1:{port}")
    for _ in range(5):
        assert client.lookup(keys_of(3)) == [None] * 3
    assert client.counts["failed_requests"] == 3
    assert client.counts["skipped_requests"] == 2
    assert client.usage()["dead_shards"] == 1


@pytest.fixture
def hung():
    """A real `kvtier serve-locations` process that can be stopped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_kvtier", "serve-locations", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    import json

    yield process, json.loads(process.stdout.readline())["url"]
    process.send_signal(signal.SIGCONT)
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()


def test_a_hung_shard_costs_three_deadlines_and_is_tried_again_after_a_pause(
    hung, serve, connect, clock
):
    process, url = hung
    live = serve()
    client = connect(url, live.url, deadline_s=5.0)
    keys = keys_of(40)
    client.publish(items_of(keys), ttl_s=3600)
    assert None not in client.lookup(keys)
    client._deadline_s = 1.0  # of the live shard, too, on a machine that is busy
    os.kill(process.pid, signal.SIGSTOP)
    mine = client.shard_of(keys)
    for _ in range(6):
        found = client.lookup(keys)
        assert [v is not None for v in found] == (mine == 1).tolist(), "the live shard answers"
    assert client.counts["failed_requests"] == 3, "after three deadlines nobody waits any more"
    assert client.counts["skipped_requests"] == 3
    os.kill(process.pid, signal.SIGCONT)
    client._deadline_s = 5.0
    assert client.usage()["dead_shards"] == 1
    clock.advance(30.1)
    assert None not in client.lookup(keys)
    assert client.usage()["dead_shards"] == 0


def test_without_the_extra_redis_the_error_names_it(monkeypatch, clock):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(ConfigError, match=r"./packages/kvtier\[redis\]"):
        LocationClient(["redis://127.0.0.1:1/0"], key=b"", prefix=b"", clock=clock)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "shared key"),
        (["--key-file", "/nonexistent/key"], "key file"),
        (["--host", "not.a.host.invalid"], "shared key"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "deepinfer_kvtier", "serve-locations", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_short_key_file_is_refused(tmp_path):
    from deepinfer_kvtier.ops.cli.locations import read_key

    (tmp_path / "key").write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        read_key(tmp_path / "key")
    (tmp_path / "key").write_bytes(KEY + b"\n")
    assert read_key(tmp_path / "key") == KEY


class SwallowingProxy:
    """Passes bytes on, but connections opened while `swallows` is set get a handshake at most."""

    def __init__(self, server: socket.socket, host: str, port: int) -> None:
        self.swallows = True
        self._server, self._target = server, (host, port)
        self._sides: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(30)
        for side in self._sides:
            with contextlib.suppress(OSError):  # the other end may have closed it
                side.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join(30)
        for side in self._sides:
            side.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._sides.append(near)
                far = socket.create_connection(self._target)
                self._sides.append(far)
                most = 24 + 32 if self.swallows else None
                for arguments in ((near, far, None), (far, near, most)):
                    thread = threading.Thread(target=self._pump, args=arguments)
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket, most: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                passed += len(data)
                if most is not None and passed > most:
                    return
                target.sendall(data)


def test_a_connection_that_swallows_everything_is_replaced_after_the_pause(serve, connect, clock):
    served = serve()
    (key,) = keys_of(1)
    with socket.create_server(("127.0.0.1", 0)) as middle:
        proxy = SwallowingProxy(middle, served.host, served.port)
        try:
            client = connect(f"tcp://127.0.0.1:{middle.getsockname()[1]}", deadline_s=0.2)
            for _ in range(3):
                assert client.lookup([key]) == [None]
            assert client.usage()["dead_shards"] == 1
            proxy.swallows = False
            client._deadline_s = 30.0
            clock.advance(30.1)
            client.publish([(key, b"value")], ttl_s=60)
            assert client.lookup([key]) == [b"value"]
        finally:
            proxy.close()


def test_nothing_is_asked_of_a_service_that_cannot_prove_the_key(connect):
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as pretender:

        def serve_one() -> None:
            near, _ = pretender.accept()
            with near:
                near.sendall(wire.MAGIC + bytes(16))
                near.recv(16 + 32, socket.MSG_WAITALL)
                near.sendall(bytes(32))
                received.append(near.recv(4096))

        thread = threading.Thread(target=serve_one)
        thread.start()
        client = connect(f"tcp://127.0.0.1:{pretender.getsockname()[1]}", key=KEY)
        assert client.lookup(keys_of(1)) == [None]
        thread.join(20)
    assert received == [b""], "the connection is closed, no key of ours is named"
