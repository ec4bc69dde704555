"""Who may connect, and what a connection refuses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
import uvloop
from toy_engine import PATIENCE_S, identity, run, until

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.wire import FrameType

HELLO = identity("router")
KEY = b"a cluster key of thirty-two byte"


@contextlib.asynccontextmanager
async def listener(handler, key):
    accepted: asyncio.Queue = asyncio.Queue()
    peers, tasks = [], set()

    async def serve(peer):
        try:
            await transport.accept(peer, identity("decode"), key)
        except (TransferError, TimeoutError) as error:
            accepted.put_nowait(error)
        else:
            accepted.put_nowait(peer)
            await handler(peer)

    def connected(peer):
        peers.append(peer)
        tasks.add(asyncio.create_task(serve(peer)))

    server = await transport.listen("127.0.0.1", 0, connected)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", accepted
    finally:
        server.close()
        await asyncio.gather(*tasks)
        for peer in peers:
            await close(peer)


async def close(writer):
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def echo(peer):
    while (frame := await peer.receive()) is not None:
        peer.send(FrameType(frame.type), frame.body())


@pytest.mark.parametrize("key", [None, b"secret"])
def test_peers_with_the_same_key_talk(key):
    async def body():
        async with listener(echo, key) as (address, _):
            peer = await transport.connect(address, HELLO, key)
            assert peer.hello["role"] == "decode"
            for n in range(3):
                peer.send(FrameType.FLUSH, {"id": n})
                assert (await peer.receive()).body() == {"id": n}
            await close(peer)

    run(body())


@pytest.mark.parametrize(("theirs", "mine"), [(b"a", b"b"), (b"a", None), (None, b"b")])
def test_without_the_same_key_neither_side_accepts_the_other(theirs, mine):
    async def body():
        async with listener(echo, theirs) as (address, accepted):
            with pytest.raises(TransferError):
                await transport.connect(address, HELLO, mine)
            got = await accepted.get()
            if theirs is not None:
                assert isinstance(got, TransferError)

    run(body())


class Between:
    """Whoever sits between two workers: sees every byte, may change, repeat or drop frames."""

    def __init__(self, target, change=lambda number, frame: [frame]):
        self.target = transport.parse_address(target)
        self.change = change
        self.seen = bytearray()
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        up = await asyncio.open_connection(*self.target)
        for pump in (self._frames(reader, up[1]), self._raw(up[0], writer)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)

    async def _raw(self, source, sink):
        try:
            while data := await source.read(65536):
                self.seen.extend(data)
                sink.write(data)
        finally:
            sink.close()

    async def _frames(self, source, sink):
        """Of the connecting side: one frame at a time through `change`."""
        try:
            for number in itertools.count():
                head = await source.readexactly(wire.FRAME.size)
                body = await source.readexactly(wire.FRAME.unpack(head)[0])
                self.seen.extend(head + body)
                for frame in self.change(number, head + body):
                    sink.write(frame)
        except asyncio.IncompleteReadError:
            pass
        finally:
            sink.close()


SECRET = "the prompt that nobody else may read"


def test_somebody_between_sees_neither_key_nor_content():
    async def body():
        async with listener(echo, KEY) as (address, _):
            between = Between(address)
            async with between as there:
                peer = await transport.connect(there, HELLO, KEY)
                peer.send(FrameType.ABORT, {"rid": SECRET, "attempt": 1, "reason": SECRET})
                assert (await peer.receive()).body()["reason"] == SECRET
                await close(peer)
            assert b"nonce" in between.seen
            for secret in (KEY, SECRET.encode(), b"engine_id"):
                assert secret not in between.seen

    run(body())


def flip(at):
    def change(number, frame):
        # 0 HELLO, 1 IDENTITY, 2.. messages
        if number != 2:
            return [frame]
        data = bytearray(frame)
        data[at] ^= 1
        return [bytes(data)]

    return change


def renumbered(number, frame):
    """The last frame again, with the number that is due."""
    if number != 2:
        return [frame]
    length, kind, version, flags, seq = wire.FRAME.unpack(frame[: wire.FRAME.size])
    again = wire.FRAME.pack(length, kind, version, flags, seq + 1)
    return [frame, again + frame[wire.FRAME.size :]]


@pytest.mark.parametrize(
    "change",
    [
        flip(wire.FRAME.size),
        flip(-1),
        flip(4),
        flip(6),
        lambda number, frame: [frame] * (1 + (number == 2)),
        renumbered,
        lambda number, frame: [] if number == 2 else [frame],
    ],
    ids=["body", "tag", "type", "flag", "replayed", "replayed as the next", "left out"],
)
def test_a_frame_that_somebody_changed_repeated_or_dropped_ends_the_connection(change):
    async def body():
        heard: asyncio.Queue = asyncio.Queue()

        async def reads(peer):
            try:
                while (frame := await peer.receive()) is not None:
                    heard.put_nowait(frame.body()["id"])
            except TransferError as error:
                heard.put_nowait(error)

        async with listener(reads, KEY) as (address, _), Between(address, change) as there:
            peer = await transport.connect(there, HELLO, KEY)
            for number in range(3):
                peer.send(FrameType.FLUSH, {"id": number})
            got = []
            while not got or not isinstance(got[-1], Exception):
                got.append(await heard.get())
            assert got[:-1] in ([], [0])
            await close(peer)

    run(body())


@pytest.mark.parametrize("number", [0, 1], ids=["hello", "identity"])
def test_a_handshake_that_somebody_changed_comes_to_nothing(number):
    def change(at, frame):
        data = bytearray(frame)
        if at == number:
            data[-1] ^= 1
        return [bytes(data)]

    async def body():
        async with listener(echo, KEY) as (address, accepted), Between(address, change) as there:
            with pytest.raises(TransferError):
                await transport.connect(there, HELLO, KEY)
            assert isinstance(await accepted.get(), TransferError)

    run(body())


def test_a_recorded_connection_cannot_be_played_again():
    async def body():
        async with listener(echo, KEY) as (address, accepted):
            recorded = []
            between = Between(address, lambda number, frame: recorded.append(frame) or [frame])
            async with between as there:
                peer = await transport.connect(there, HELLO, KEY)
                peer.send(FrameType.FLUSH, {"id": 1})
                await peer.receive()
                await close(peer)
            assert not isinstance(await accepted.get(), Exception)
            _, writer = await asyncio.open_connection(*transport.parse_address(address))
            writer.write(b"".join(recorded))
            assert isinstance(await accepted.get(), TransferError)
            await close(writer)

    run(body())


def test_nothing_in_clear_is_taken_once_a_key_is_there():
    """A peer that leaves its public key out, to be talked to in clear, is refused."""

    async def body():
        async with listener(echo, KEY) as (address, accepted):
            _, writer = await asyncio.open_connection(*transport.parse_address(address))
            hello = wire.pack_body({"role": "router", "epoch": 5, "nonce": bytes(32)})
            writer.write(wire.pack_frame(FrameType.HELLO, 0, len(hello)) + hello)
            error = await accepted.get()
            assert isinstance(error, TransferError)
            assert "no cluster key" in str(error)
            await close(writer)

    run(body())


def test_a_peer_of_another_version_is_refused_by_both_sides():
    async def body():
        async with listener(echo, None) as (address, accepted):
            _, writer = await asyncio.open_connection(*transport.parse_address(address))
            hello = wire.pack_body({"role": "router", "epoch": 5, "nonce": bytes(32)})
            writer.write(wire.FRAME.pack(len(hello), FrameType.HELLO, 1, 0, 0) + hello)
            error = await accepted.get()
            assert f"version {wire.VERSION}, the peer 1" in str(error)
            await close(writer)

        async def old(reader, writer):
            writer.write(wire.FRAME.pack(1, FrameType.HELLO, 1, 0, 0) + b"\x80")
            await reader.read()
            writer.close()

        server = await asyncio.start_server(old, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TransferError, match="the peer 1"):
            await transport.connect(f"127.0.0.1:{port}", HELLO, None)
        server.close()

    run(body())


def test_without_a_key_a_peer_of_another_machine_is_not_taken(monkeypatch):
    async def body():
        monkeypatch.setattr(transport, "is_loopback", lambda host: False)
        async with listener(echo, None) as (address, accepted):
            _, writer = await asyncio.open_connection(*transport.parse_address(address))
            assert "this machine" in str(await accepted.get())
            await close(writer)

    run(body())


@pytest.mark.parametrize(
    "bytes_first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.pack_frame(FrameType.STATUS, 0, 2) + b"\x80\x80",
        wire.pack_frame(FrameType.HELLO, 0, 1) + b"\x80",
        wire.pack_frame(FrameType.HELLO, 0, 3) + b"\xc1\xff\x00",
        wire.FRAME.pack(1 << 31, FrameType.HELLO, wire.VERSION, 0, 0),
        wire.FRAME.pack(1 << 23, FrameType.RESERVE, wire.VERSION, 0, 0),
    ],
    ids=["http", "no hello", "no nonce", "not msgpack", "huge", "large before it is known"],
)
def test_a_stranger_is_turned_away(bytes_first):
    async def body():
        async with listener(echo, b"k") as (address, accepted):
            reader, writer = await asyncio.open_connection(*transport.parse_address(address))
            writer.write(bytes_first)
            assert isinstance(await accepted.get(), TransferError)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # our HELLO, then the end
            await close(writer)

    run(body())


def test_a_frame_out_of_sequence_ends_the_connection():
    async def body():
        failures: asyncio.Queue = asyncio.Queue()

        async def reads(peer):
            with pytest.raises(TransferError, match="expected frame"):
                await peer.receive()
            failures.put_nowait(True)

        async with listener(reads, None) as (address, _):
            peer = await transport.connect(address, HELLO, None)
            peer._sent += 1
            peer.send(FrameType.STATUS, {})
            assert await failures.get()
            await close(peer)

    run(body())


@pytest.mark.parametrize("key", [None, b"secret"])
def test_units_arrive_whole_whatever_was_in_their_memory_before(key):
    """Twenty are on the way before the first is taken, of lengths that fit each other's buffers."""
    sizes = [(7 * n) % 20 * 5000 for n in range(20)]
    sent = [bytes([n + 1]) * size for n, size in enumerate(sizes)]

    async def body():
        got: asyncio.Queue = asyncio.Queue()
        go = asyncio.Event()

        async def reads(peer):
            await go.wait()
            while (frame := await peer.receive()) is not None:
                header = wire.UnitHeader.unpack(frame.data)
                got.put_nowait((header.unit, bytes(frame.data[wire.UNIT_HEADER_BYTES :])))

        async with listener(reads, key) as (address, _):
            peer = await transport.connect(address, HELLO, key)
            for n, data in enumerate(sent):
                header = wire.UnitHeader(1, 1, 0, n, 0, 1, 0, 1, len(data), 0)
                peer.send_unit(header, [memoryview(data)])
            go.set()
            assert [await got.get() for _ in sent] == list(enumerate(sent))
            await close(peer)

    run(body())


@pytest.mark.parametrize("key", [None, b"secret"])
def test_a_unit_stays_as_it_is_until_the_next_one_is_asked_for(key):
    """Three others of its size arrive meanwhile."""

    async def body():
        held, done = asyncio.Event(), asyncio.Event()
        seen = []

        async def reads(peer):
            frame = await peer.receive()
            held.set()
            await until(lambda: len(peer._frames) == 3)
            seen.append(bytes(frame.data[wire.UNIT_HEADER_BYTES :]))
            done.set()

        async with listener(reads, key) as (address, _):
            peer = await transport.connect(address, HELLO, key)
            for n in range(4):
                header = wire.UnitHeader(1, 1, 0, n, 0, 1, 0, 1, 5000, 0)
                peer.send_unit(header, [memoryview(bytes([n + 1]) * 5000)])
                await held.wait()
            await done.wait()
            assert seen == [bytes([1]) * 5000]
            await close(peer)

    run(body())


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:99999", "host:x"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConfigError, match="host:port"):
        transport.parse_address(address)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "10.0.0.1", "::", "example.org")),
    ],
)
def test_beyond_loopback_a_cluster_key_is_demanded(host, loopback):
    transport.check_key(host, b"key")
    if loopback:
        transport.check_key(host, None)
    else:
        with pytest.raises(ConfigError, match="cluster key"):
            transport.check_key(host, None)


@pytest.mark.parametrize("key", [None, KEY], ids=["in clear", "sealed"])
def test_units_land_where_they_belong_and_are_told_by_their_header(key):
    """Every other one has a place, of two parts."""
    sent = [bytes([n + 1]) * (3000 + n) for n in range(6)]
    places = {n: [bytearray(1000), bytearray(len(sent[n]) - 1000)] for n in (0, 2, 4)}

    def place(header):
        parts = places.get(header.unit)
        return None if parts is None else [memoryview(part) for part in parts]

    async def body():
        got: asyncio.Queue = asyncio.Queue()

        async def reads(peer):
            peer.place = place
            while (frame := await peer.receive()) is not None:
                got.put_nowait((frame.placed, bytes(frame.data)))

        async with listener(reads, key) as (address, _):
            peer = await transport.connect(address, HELLO, key)
            for n, data in enumerate(sent):
                header = wire.UnitHeader(1, 1, 0, n, 0, 1, 0, 1, len(data), 0)
                peer.send_unit(header, [memoryview(data)[:7], memoryview(data)[7:]])
            for n, data in enumerate(sent):
                placed, said = await got.get()
                assert placed == (n in places)
                head, rest = said[: wire.UNIT_HEADER_BYTES], said[wire.UNIT_HEADER_BYTES :]
                assert wire.UnitHeader.unpack(head, elsewhere=True).unit == n
                assert (rest, b"".join(places.get(n, []))) == (
                    (b"", data) if placed else (data, b"")
                )
            await close(peer)

    run(body())


def test_what_is_sealed_stays_as_it_is_until_it_has_left():
    """More units than sockets hold, to a peer that does not read yet: the memory of one is not used
    for the next. As workers run: asyncio's own loop copies what it cannot send at once."""
    sent = [bytes([n + 1]) * (1 << 20) for n in range(40)]

    async def body():
        got: asyncio.Queue = asyncio.Queue()
        go = asyncio.Event()

        async def reads(peer):
            await go.wait()
            while (frame := await peer.receive()) is not None:
                got.put_nowait(bytes(frame.data[wire.UNIT_HEADER_BYTES :]))

        async with listener(reads, KEY) as (address, _):
            peer = await transport.connect(address, HELLO, KEY)
            for n, data in enumerate(sent):
                header = wire.UnitHeader(1, 1, 0, n, 0, 1, 0, 1, len(data), 0)
                peer.send_unit(header, [memoryview(data)])
                await asyncio.sleep(0)
            go.set()
            assert [await got.get() for _ in sent] == sent
            await close(peer)

    uvloop.run(asyncio.wait_for(body(), PATIENCE_S))
