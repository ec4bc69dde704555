"""Units by one-sided writes: with a stand-in for the library here, with Mooncake's own in
`nox -s transfer_mooncake`."""

from __future__ import annotations

import asyncio
import sys

import pytest
from fake_writes import FakeEngine
from toy_engine import BLOCK, alone, ask, cluster, greedy, prompt, request, run, toy, until

from deepinfer_engine.cli.worker import remote_writes
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.pd import remote_writes as module
from deepinfer_engine.pd.remote_writes import RemoteWrites, load_engine
from deepinfer_engine.settings import Settings

LONG = 9 * BLOCK + 3
UNITS = 11
"""Of such a prompt, when each block is one: ten of blocks and the state."""


def fake():
    return FakeEngine()


def real():
    pytest.importorskip("mooncake.engine")
    return load_engine()


ENGINES = pytest.mark.parametrize("made", [fake, real])


@pytest.fixture(autouse=True)
def one_block_a_unit(monkeypatch):
    monkeypatch.setattr("deepinfer_engine.pd.sending.UNIT_BYTES", toy().layout.block_bytes)


def writing(it, made=fake):
    """Give every worker an end of the library; those of prefill and of decode."""
    engines = [made() for _ in it.workers]
    ends = [*(w.service.units for w in it.prefills), *(w.service for w in it.decodes)]
    for end, engine in zip(ends, engines, strict=True):
        end.writes = RemoteWrites("127.0.0.1", engine=engine)
    return engines[: len(it.prefills)], engines[len(it.prefills) :]


async def renewed(it):
    """Connections made for the router's probe go; those that come next know of the writes."""
    for prefill in it.prefills:
        for link in list(prefill.service._decodes.values()):
            (await link).close()
    await until(lambda: not any(w.service.units._rings for w in it.prefills))
    await until(lambda: not any(w.service._receivers for w in it.decodes))


def counted(it, name):
    return sum(w.service.extra_counters().get(name, 0) for w in it.workers)


@ENGINES
def test_prompts_go_by_writes_and_say_what_they_say_alone(made, monkeypatch):
    """Into a place so small that units wait for one another."""
    room = 3 * max(toy().layout.block_bytes, toy().layout.state_bytes)
    monkeypatch.setattr(module.Landing.__init__, "__defaults__", (room,))

    async def body():
        async with cluster(prefills=2, decodes=2) as it:
            writing(it, made)
            await renewed(it)
            names = [f"r{i}" for i in range(12)]
            answers = await asyncio.gather(
                *(ask(it.engine, request(n, prompt(i, LONG + i))) for i, n in enumerate(names))
            )
            for i, answer in enumerate(answers):
                assert answer.tokens == alone(prompt(i, LONG + i), greedy())
            sent = sum(w.service.extra_counters()["transfer_bytes"] for w in it.prefills)
            assert sent == counted(it, "transfer_remote_bytes") > 0
            assert counted(it, "transfer_shared_bytes") == 0
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("first", [0, 4])
def test_after_a_write_that_fails_units_go_over_the_connection(first):
    async def body():
        async with cluster() as it:
            (prefill,), _ = writing(it)
            await renewed(it)
            prefill.fails = lambda number: number == first
            answer = await ask(it.engine, request("r", prompt(1, LONG)))
            assert answer.tokens == alone(prompt(1, LONG), greedy())
            assert prefill.written == first + 1
            assert counted(it, "transfer_digest_errors") == 0
            await until(it.idle)
            again = await ask(it.engine, request("s", prompt(2, LONG)))
            assert again.tokens == alone(prompt(2, LONG), greedy())
            assert prefill.written == first + 1
            await until(it.idle)

    run(body())


@pytest.mark.parametrize("why", ["decode has none", "it registers nothing", "prefill cannot"])
def test_where_no_place_is_lent_units_go_over_the_connection(why):
    async def body():
        async with cluster() as it:
            (prefill,), (decode,) = writing(it)
            if why == "decode has none":
                it.decodes[0].service.writes = None
            else:
                engine = decode if why == "it registers nothing" else prefill
                engine.register_memory = lambda address, size: -1
            await renewed(it)
            answer = await ask(it.engine, request("r", prompt(1, LONG)))
            assert answer.tokens == alone(prompt(1, LONG), greedy())
            assert prefill.written == counted(it, "transfer_remote_bytes") == 0
            await until(it.idle)

    run(body())


def test_what_somebody_else_wrote_there_is_a_damaged_unit_and_is_sent_again():
    async def body():
        async with cluster() as it:
            (prefill,), _ = writing(it)
            await renewed(it)
            prefill.spoils = lambda number: number == 2
            answer = await ask(it.engine, request("r", prompt(1, LONG)))
            assert answer.tokens == alone(prompt(1, LONG), greedy())
            assert counted(it, "transfer_digest_errors") == counted(it, "transfer_resends") == 1
            await until(it.idle)

    run(body())


def test_a_client_that_leaves_during_a_write_leaves_nothing_behind():
    """The blocks it came from are free at once: what is written is a copy."""

    async def body():
        async with cluster() as it:
            (prefill,), _ = writing(it)
            await renewed(it)
            prefill.may_write.clear()
            asked = asyncio.create_task(ask(it.engine, request("r", prompt(1, LONG))))
            await until(prefill.entered.is_set)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(it.idle)
            prefill.may_write.set()
            answer = await ask(it.engine, request("s", prompt(2, LONG)))
            assert answer.tokens == alone(prompt(2, LONG), greedy())
            assert counted(it, "transfer_digest_errors") == 0
            await until(it.idle)

    run(body())


def test_a_prefill_that_dies_during_a_write_loses_its_place_and_another_serves_the_prompt():
    async def body():
        async with cluster(prefills=2, recovery_s=30.0) as it:
            ends, (decode,) = writing(it)
            await renewed(it)
            for end in ends:
                end.may_write.clear()
            asked = asyncio.create_task(ask(it.engine, request("r", prompt(1, LONG))))
            await until(lambda: any(end.entered.is_set() for end in ends))
            at = next(i for i, end in enumerate(ends) if end.entered.is_set())
            (place,) = decode.registered
            await it.prefills.pop(at).kill()
            await until(lambda: decode.taken_back == [place])
            for end in ends:
                end.may_write.set()
            assert (await asked).tokens == alone(prompt(1, LONG), greedy())
            await until(it.idle)

    run(body())


def test_a_place_that_was_written_is_lent_again_and_its_memory_never_given_back():
    async def body():
        async with cluster() as it:
            _, (decode,) = writing(it)
            for name in ("first", "second"):
                await renewed(it)
                answer = await ask(it.engine, request(name, prompt(1, LONG)))
                assert answer.tokens == alone(prompt(1, LONG), greedy())
            assert decode.ever == [decode.ever[0]] * 2
            await until(it.idle)

    run(body())


def test_a_worker_is_told_what_it_means_before_it_writes_unsealed():
    with pytest.raises(ConfigError, match="--trust-transfer-network"):
        remote_writes(Settings(transfer="mooncake"), "127.0.0.1:0")
    assert remote_writes(Settings(transfer="tcp"), "127.0.0.1:0") is None


def test_what_is_missing_is_named_with_how_to_install_it(monkeypatch):
    wanted = Settings(transfer="mooncake", trust_transfer_network=True)
    monkeypatch.setattr(module, "_DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ConfigError, match=r"pip install .*engine\[mooncake\]"):
        remote_writes(wanted, "127.0.0.1:0")
    monkeypatch.setattr(module, "_DISTRIBUTIONS", ("msgpack",))
    monkeypatch.setattr(module, "_OLDEST", (99, 0, 0))
    with pytest.raises(ConfigError, match=r"99\.0\.0 or newer"):
        remote_writes(wanted, "127.0.0.1:0")
    monkeypatch.setattr(module, "_OLDEST", (0, 0, 1))
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="libibverbs1"):
        remote_writes(wanted, "127.0.0.1:0")


def test_a_device_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="mlx5_0"):
        RemoteWrites("127.0.0.1", rdma="mlx5_0", engine=FakeEngine())
