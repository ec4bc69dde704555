"""Who may connect, and what a connection refuses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from toy_engine import run

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import transport, wire
from deepinfer_engine.pd.wire import FrameType

HELLO = {"role": "test"}


@contextlib.asynccontextmanager
async def listener(handler, key):
    accepted: asyncio.Queue = asyncio.Queue()
    peers, tasks = [], set()

    async def serve(peer):
        try:
            await transport.accept(peer, {"role": "server"}, key)
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
            assert peer.hello["role"] == "server"
            for n in range(3):
                peer.send(FrameType.STATUS, {"n": n})
                assert (await peer.receive()).body() == {"n": n}
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


def test_the_key_itself_never_travels():
    seen = bytearray()

    async def body():
        async def relay(reader, writer):
            up_reader, up_writer = await asyncio.open_connection(*target)

            async def pump(source, sink):
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                await close(sink)

            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

        async with listener(echo, b"very secret key") as (address, _):
            target = transport.parse_address(address)
            proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
            port = proxy.sockets[0].getsockname()[1]
            peer = await transport.connect(f"127.0.0.1:{port}", HELLO, b"very secret key")
            peer.send(FrameType.STATUS, {"n": 1})
            await peer.receive()
            await close(peer)
            proxy.close()

    run(body())
    assert b"nonce" in seen
    assert b"very secret key" not in seen


@pytest.mark.parametrize(
    "bytes_first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        wire.pack_frame(FrameType.STATUS, 0, 2) + b"\x80\x80",
        wire.pack_frame(FrameType.HELLO, 0, 1) + b"\x80",
        wire.pack_frame(FrameType.HELLO, 0, 3) + b"\xc1\xff\x00",
        wire.FRAME.pack(1 << 31, FrameType.HELLO, 1, 0, 0),
        wire.FRAME.pack(1 << 23, FrameType.RESERVE, 1, 0, 0),
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
