"""What machines say to each other about windows: records, frames, owners of hints, settings."""

from __future__ import annotations

import socket
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.remote.state_exchange import (
    LocalLocations,
    WindowRecord,
    WindowSettings,
    wire,
)
from deepinfer_kvtier.remote.state_exchange.peers import owner
from deepinfer_kvtier.testing import ManualClock, payload_of

KEY = b"k" * 32


ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(lambda ip: f"[{ip}]")
).flatmap(lambda host: st.integers(0, 65535).map(lambda port: f"{host}:{port}"))


@given(
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    ADDRESSES,
)
def test_a_directory_record_is_64_bytes_and_comes_back(key, who, generation, ttl, size, m, address):
    record = WindowRecord(key, who, generation, ttl, size, m, address)
    data = record.pack()
    assert len(data) == 64
    assert WindowRecord.unpack(data) == record


@given(st.binary(max_size=200))
def test_noise_is_refused_by_every_parser(data):
    for parse in (WindowRecord.unpack, wire.PullRequest.unpack, wire.PullAnswer.unpack):
        try:
            parse(data)
        except wire.WireError:
            continue
        assert len(data) in (wire.RECORD_BYTES, wire.ANSWER_BYTES, 68)


@given(st.binary(max_size=300), st.integers(0, 500), st.integers(1, 255))
def test_a_frame_changed_in_any_bit_or_replayed_is_refused(body, at, flip):
    nonces = b"a" * 32, b"b" * 32
    client = wire.Session(KEY, *nonces, wire.CLIENT)
    frame = bytearray(client.seal(wire.PULL, body))
    server = wire.Session(KEY, *nonces, wire.SERVER)
    head, rest = bytes(frame[: wire.HEAD_BYTES]), bytes(frame[wire.HEAD_BYTES :])
    assert server.open(head, rest) == wire.PULL
    with pytest.raises(wire.WireError):
        server.open(head, rest)
    # Byte 0..3 is the length, which decides what is read and is not part of the tag.
    frame[4 + at % (len(frame) - 4)] ^= flip
    fresh = wire.Session(KEY, *nonces, wire.SERVER)
    with pytest.raises(wire.WireError):
        fresh.open(bytes(frame[: wire.HEAD_BYTES]), bytes(frame[wire.HEAD_BYTES :]))


def test_a_member_that_leaves_moves_only_its_own_keys():
    members = [f"10.0.0.{i}:7000" for i in range(1, 6)]
    keys = [payload_of(bytes([i, i]), 16).tobytes() for i in range(200)]
    before = {key: owner(key, members) for key in keys}
    after = {key: owner(key, members[1:]) for key in keys}
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if before[key] == members[0]}
    assert min(list(before.values()).count(m) for m in members) > 20


def test_the_local_directory_forgets_by_time_and_by_room():
    clock = ManualClock()
    directory = LocalLocations(capacity=3, clock=clock)
    made = [
        WindowRecord(bytes([i]) * 16, b"machine1", 1, 1000 * (i + 1), 9, 0, "127.0.0.1:1")
        for i in range(4)
    ]
    directory.publish(made)
    keys = [record.key for record in made]
    assert [r is not None for r in directory.lookup(keys)] == [False, True, True, True]
    clock.advance(2.5)
    found = directory.lookup(keys)
    assert [r is not None for r in found] == [False, False, True, True]
    assert found[3].ttl_ms == 1500
    directory.withdraw([keys[2]], b"machine2")
    assert directory.lookup(keys)[2] is not None, "somebody else's record"
    directory.withdraw([keys[2]], b"machine1")
    assert directory.lookup(keys)[2] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": b"short"}, "key"),
        ({"listen": "0.0.0.0:7000"}, "advertise"),
        ({"listen": "localhost"}, "listen"),
        ({"members": ["host:1"]}, "members"),
        ({"locations": "redis"}, "redis_url"),
        ({"locations": "gossip"}, "locations"),
        ({"deadline_ms": 0}, "deadline_ms"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(kvtier.ConfigError, match=message):
        kvtier.open(host_bytes=1 << 20, windows={"key": KEY, **settings})


def test_the_key_is_never_shown():
    settings = WindowSettings(key=KEY, redis_url="redis://:password@127.0.0.1")
    assert "kkkk" not in repr(settings)
    assert "password" not in repr(settings)


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(kvtier.ConfigError, match=r"./packages/kvtier\[mooncake\]"):
        kvtier.open(
            host_bytes=1 << 20,
            windows={"key": b"k" * 32, "locations": LocalLocations(), "transport": "mooncake"},
        )


def test_a_port_in_use_is_a_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(kvtier.ConfigError, match="cannot listen on"):
            kvtier.open(host_bytes=1 << 20, windows={"key": KEY, "listen": address})
