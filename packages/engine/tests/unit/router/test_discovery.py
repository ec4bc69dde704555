"""Which workers a router has: from a file, from themselves, and how they leave."""

from __future__ import annotations

import asyncio
import json
import os

import httpx
import pytest
from server_fakes import byte_codec
from toy_engine import (
    KEY,
    LONG_TOKENS,
    alone,
    ask,
    cluster,
    gated,
    greedy,
    prompt,
    request,
    run,
    start_worker,
    toy,
    until,
)

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.errors import ConfigError, EngineUnavailable, RequestError, TransferError
from deepinfer_engine.pd import announcing
from deepinfer_engine.pd.announcing import Announcing, signature
from deepinfer_engine.pd.decode import DecodeService
from deepinfer_engine.pd.prefill import PrefillService
from deepinfer_engine.pd.wire import VERSION
from deepinfer_engine.router.discovery import TTL_S, Announced, Directory, read_workers
from deepinfer_engine.router.remote import RemoteEngine
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.run import bind, listening, url_of
from deepinfer_engine.settings import Settings

NOBODY = {"prefill": (), "decode": (), "encode": ()}


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def words(**changes):
    said = {"protocol": VERSION, "role": "prefill", "address": "10.0.0.1:7000", "epoch": 5}
    return json.dumps({**said, "number": 1, **changes}).encode()


def hear(announced, key=KEY, **changes):
    body = words(**changes)
    return announced.hear(body, signature(key, body))


def test_a_worker_is_there_for_ten_seconds_after_each_word():
    clock = Clock()
    announced = Announced(KEY, clock=clock)
    hear(announced)
    hear(announced, role="decode", address="10.0.0.2:7000")
    clock.now += TTL_S
    hear(announced, number=2)
    both = {"prefill": ("10.0.0.1:7000",), "decode": ("10.0.0.2:7000",), "encode": ()}
    assert announced.members() == both
    clock.now += 0.1
    assert announced.members() == {**both, "decode": ()}


def test_a_worker_that_leaves_is_gone_at_once_and_may_come_again():
    announced = Announced(KEY, clock=Clock())
    hear(announced)
    hear(announced, number=2, leaving=True)
    assert announced.members() == NOBODY
    hear(announced, epoch=6)
    assert announced.members()["prefill"] == ("10.0.0.1:7000",)


def test_a_worker_that_refuses_connections_is_gone_until_it_says_otherwise():
    announced = Announced(KEY, clock=Clock())
    hear(announced)
    announced.refused("prefill", "10.0.0.1:7000")
    assert announced.members() == NOBODY
    hear(announced, number=2)
    assert announced.members() != NOBODY


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "router"},
        {"address": "here"},
        {"more": 1},
        {"protocol": VERSION + 1},
        {"epoch": -1},
        {"number": "1"},
    ],
)
def test_words_that_are_no_announcement_are_refused(changes):
    with pytest.raises(TransferError):
        hear(Announced(KEY, clock=Clock()), **changes)


def test_nobody_without_the_cluster_key_names_a_worker():
    announced, body = Announced(KEY, clock=Clock()), words()
    for signed in ("", "0" * 64, signature(b"another key", body), signature(KEY, body + b" ")):
        with pytest.raises(TransferError, match="not signed"):
            announced.hear(body, signed)
    assert announced.members() == NOBODY


def test_an_old_word_is_not_taken_again():
    announced = Announced(KEY, clock=Clock())
    hear(announced, epoch=6, number=2)
    for old in ({"epoch": 6, "number": 2}, {"epoch": 6, "number": 1}, {"epoch": 5, "number": 9}):
        with pytest.raises(TransferError, match="late or twice"):
            hear(announced, **old)


def test_the_workers_file_is_followed_and_a_bad_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "workers.toml"

    def write(text):
        temporary = tmp_path / "next"
        temporary.write_text(text)
        os.replace(temporary, path)

    write('prefill = ["10.0.0.1:1"]')
    directory = Directory({"decode": ["10.0.0.9:9"]}, file=path)
    assert directory.members() == {
        "prefill": ("10.0.0.1:1",),
        "decode": ("10.0.0.9:9",),
        "encode": (),
    }
    write('prefill = ["10.0.0.1:1", "10.0.0.2:1"]\ndecode = ["10.0.0.3:1", "10.0.0.9:9"]')
    both = {
        "prefill": ("10.0.0.1:1", "10.0.0.2:1"),
        "decode": ("10.0.0.9:9", "10.0.0.3:1"),
        "encode": (),
    }
    assert directory.members() == both
    for bad in ("prefill = [", "prefil = []", "prefill = [1]", 'decode = ["x"]'):
        write(bad)
        assert directory.members() == both
        assert str(path) in caplog.text or "host:port" in caplog.text
        caplog.clear()
    path.unlink()
    assert directory.members() == both
    write("")
    assert directory.members() == {"prefill": (), "decode": ("10.0.0.9:9",), "encode": ()}
    with pytest.raises(ConfigError):
        read_workers(tmp_path / "none.toml")


def test_workers_register_serve_and_leave_and_streams_outlive_their_leaving(monkeypatch):
    """Over real sockets: a router that starts with nobody, HTTP, and workers that announce."""
    monkeypatch.setattr(announcing, "EVERY_S", 0.05)
    sampling = greedy(60, ignore_eos=True)

    async def body():
        engine = await RemoteEngine.connect(prefill=(), decode=(), cluster_key=KEY)
        engine.follow(Directory(NOBODY, announced=Announced(KEY)))
        app = create_app(engine, byte_codec(), Settings())
        sock = bind("127.0.0.1", 0)
        async with listening(app, sock, 5.0):
            services = [PrefillService(toy(), None, EngineConfig(), KEY)]
            services += [DecodeService(gated(), None, EngineConfig(), KEY) for _ in range(2)]
            for service in services:
                service.announcing = Announcing([url_of(sock)])
            workers = [await start_worker(service) for service in services]
            await until(lambda: len([x for x in engine._links.values() if x.ready]) == 3)
            await engine._wait_ready()
            for service in services[1:]:
                service.runner.gate.clear()
            stream = engine.generate(request("r", prompt(1, 20), sampling))
            said = [await anext(stream)]
            (busy,) = [w for w in workers[1:] if w.service.unfinished()]
            (other,) = [w for w in workers[1:] if w is not busy]
            busy.stop.set()  # SIGTERM: it leaves the fleet, and what it runs goes on
            await until(lambda: ("decode", busy.address) not in engine._links)
            found = {s.name: s for s in await engine.status()}
            assert found[busy.address].draining
            for service in services[1:]:
                service.runner.gate.set()
            said += [event async for event in stream]
            tokens = [token for event in said[:-1] for token in event.token_ids]
            assert tokens == alone(prompt(1, 20), sampling)
            assert engine.migrations == 0
            await busy.task
            await until(lambda: busy.address not in [x.address for x in engine._closing.values()])
            after = await ask(engine, request("s", prompt(2, 20)))
            assert after.tokens == alone(prompt(2, 20), greedy())
            assert {s.name for s in await engine.status()} == {workers[0].address, other.address}
            for worker in workers:
                await worker.end()
        await engine.close()

    run(body())


def test_a_worker_that_registers_wants_the_cluster_key_and_an_address():
    async def body():
        for key, address in ((None, None), (KEY, "0.0.0.0:7000")):
            service = PrefillService(toy(), None, EngineConfig(), key)
            service.announcing = Announcing(["http://127.0.0.1:9"], address)
            with pytest.raises(ConfigError, match=r"DEEPINFER_CLUSTER_KEY|--advertise"):
                await start_worker(service)

    run(body())


def test_announcements_of_strangers_are_403_and_too_long_ones_413():
    async def body():
        engine = await RemoteEngine.connect(prefill=(), decode=(), cluster_key=KEY)
        app = create_app(engine, byte_codec(), Settings())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            given = await client.post(announcing.PATH, content=words())
            engine.follow(Directory(NOBODY, announced=Announced(KEY)))
            unsigned = await client.post(announcing.PATH, content=words())
            long = await client.post(announcing.PATH, content=b"x" * 5000)
            headers = {announcing.SIGNATURE_HEADER: signature(KEY, words())}
            taken = await client.post(announcing.PATH, content=words(), headers=headers)
            again = await client.post(announcing.PATH, content=words(), headers=headers)
        codes = [a.status_code for a in (given, unsigned, long, taken, again)]
        assert codes == [403, 403, 413, 200, 403]
        assert "late or twice" in again.text
        await engine.close()

    run(body())


# -- draining ------------------------------------------------------------------------------------


def links_of(it, role):
    return {link.address: link for link in it.engine._links.values() if link.role == role}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_drained_worker_gets_nothing_new_from_any_router_and_loses_nothing(role):
    """I-46: what can finish in time does."""

    async def body():
        async with cluster(prefills=2, decodes=2, decode_runner=gated) as it:
            second = await RemoteEngine.connect(
                prefill=[w.address for w in it.prefills],
                decode=[w.address for w in it.decodes],
                cluster_key=KEY,
                ready_timeout_s=30,
            )
            long = greedy(40, ignore_eos=True)
            streams = [it.engine.generate(request(f"r{i}", prompt(i, 20), long)) for i in range(8)]
            said = [[await anext(stream)] for stream in streams]
            drained = (it.prefills if role == "prefill" else it.decodes)[0]
            await it.engine.drain(drained.address)
            links = [links_of(it, role), {x.address: x for x in second._links.values()}]
            await until(lambda: all(link[drained.address].draining for link in links))
            counts = [link[drained.address].requests for link in links]
            for router in (it.engine, second):
                for i in range(6):
                    answer = await ask(router, request(f"n{i}", prompt(i, 20)))
                    assert answer.tokens == alone(prompt(i, 20), greedy())
            assert [link[drained.address].requests for link in links] == counts
            for i, stream in enumerate(streams):
                said[i] += [event async for event in stream]
                tokens = [t for event in said[i][:-1] for t in event.token_ids]
                assert tokens == alone(prompt(i, 20), long)
            assert it.engine.migrations == 0
            await it.engine.drain(drained.address, on=False)
            await until(lambda: all(not link[drained.address].draining for link in links))
            await second.close()
            await until(it.idle)

    run(body())


def test_a_drain_that_moves_lets_streams_go_on_elsewhere_word_for_word():
    sampling = greedy(200, ignore_eos=True)

    async def body():
        async with cluster(decodes=2, decode_runner=gated) as it:
            for worker in it.decodes:
                worker.service.runner.gate.clear()
            stream = it.engine.generate(request("r", prompt(1, 20), sampling))
            said = [await anext(stream)]
            (busy,) = [d for d in it.decodes if d.service.unfinished()]
            await it.engine.drain(busy.address, move=True)
            rest = asyncio.create_task(drained_of(stream))
            await until(lambda: it.engine.migrations == 1)
            for worker in it.decodes:
                worker.service.runner.gate.set()
            said += await rest
            tokens = [t for event in said[:-1] for t in event.token_ids]
            assert tokens == alone(prompt(1, 20), sampling)
            link = links_of(it, "decode")[busy.address]
            assert (link.failures, link.breaker.state) == (0, "closed")
            await until(it.idle)

    run(body())


async def drained_of(stream):
    return [event async for event in stream]


def test_the_only_worker_of_a_role_is_not_emptied_by_moving():
    async def body():
        async with cluster() as it:
            stream = it.engine.generate(
                request("r", prompt(1, 20), greedy(LONG_TOKENS, ignore_eos=True))
            )
            await anext(stream)
            address = it.decodes[0].address
            with pytest.raises(EngineUnavailable, match="no other decode worker"):
                await it.engine.drain(address, move=True)
            with pytest.raises(RequestError, match="there are"):
                await it.engine.drain("10.0.0.1:1")
            await it.engine.drain(address)
            with pytest.raises(EngineUnavailable):
                await ask(it.engine, request("s", prompt(1, 20)))
            await stream.aclose()
            await until(it.idle)

    run(body())


def test_a_request_that_reaches_a_worker_just_as_it_drains_goes_elsewhere():
    """The router has not heard yet: the worker says no, which is nobody's failure."""

    async def body():
        async with cluster(prefills=2, decodes=2) as it:
            for worker in (it.prefills[0], it.decodes[0]):
                worker.service.take_nothing_new(True)
            for i in range(8):
                for link in it.engine._links.values():
                    link.draining = False
                answer = await ask(it.engine, request(f"r{i}", prompt(i, 20)))
                assert answer.tokens == alone(prompt(i, 20), greedy())
            links = it.engine._links.values()
            assert [link.failures for link in links] == [0] * 4
            assert {link.breaker.state for link in links} == {"closed"}
            await until(it.idle)

    run(body())
