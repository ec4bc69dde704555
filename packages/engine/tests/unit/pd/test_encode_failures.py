"""Encode workers that fail, lie, are full or are not there: only requests with pictures notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from seeing_cluster import expected, no_other_notices, seeing, toy_with_tower
from seeing_toy import (
    PIXELS,
    POISON,
    SAME,
    SICK,
    ToyEncoder,
    seen,
)
from toy_engine import KEY, ask, run, start_worker, until

from deepinfer_engine.errors import EngineUnavailable, RequestError
from deepinfer_engine.pd.encode import EncodeService
from deepinfer_engine.pd.peers import ModelIdentity

SCRIPT = Path(__file__).parents[2] / "support" / "encode_worker.py"


@pytest.fixture
def stands_still(monkeypatch):
    """What failed is tried again at once."""
    monkeypatch.setattr("deepinfer_engine.pd.pictures.BUSY_S", 0.01)


# -- lost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [True, False], ids=["another is left", "none is left"])
def test_a_worker_that_goes_while_it_encodes_is_replaced_by_another(left):
    cat = seen("a", 1)
    (tokens,) = expected(cat)

    async def body():
        encoders = [ToyEncoder(hold=True) for _ in range(1 + left)]
        async with seeing(*encoders) as it:
            asked = asyncio.create_task(ask(it.engine, cat))
            await until(lambda: any(e.entered.is_set() for e in encoders))
            first = next(i for i, e in enumerate(encoders) if e.entered.is_set())
            killing = asyncio.create_task(it.encoders[first].kill())
            await until(lambda: it.asked()["pictures_failed"] or asked.done())
            for encoder in encoders:
                encoder.gate.set()
            if left:
                assert (await asked).tokens == tokens
                assert it.counters(1 - first)["encode_pictures"] == 1
            else:
                with pytest.raises(EngineUnavailable, match=r"could not be encoded: .* went away"):
                    await asked
            assert it.asked()["pictures_failed"] == 1
            await killing
            await no_other_notices(it)

    run(body())


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP], ids=lambda kind: kind.name)
def test_kill_9_and_stop_of_an_encode_process_are_survived(kind, monkeypatch):
    if kind is signal.SIGSTOP:
        monkeypatch.setattr("deepinfer_engine.pd.encoder_link.SILENT_S", 1.5)
    cat, dog = seen("a", 1), seen("b", 2)
    tokens = expected(cat, dog)

    async def body():
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SCRIPT), "3600",
            stdout=asyncio.subprocess.PIPE, env={**os.environ, "TOY_CLUSTER_KEY": KEY.decode()},
        )  # fmt: skip
        try:
            address = (await process.stdout.readline()).decode().strip()
            async with seeing(addresses=[address], recovery_s=60.0) as it:
                asked = asyncio.create_task(ask(it.engine, cat))
                client = it.prefills[0].service.pictures
                await until(lambda: client.counters()["picture_pixel_bytes"] == PIXELS)
                process.send_signal(kind)
                await until(lambda: client.counters()["pictures_failed"])
                monkeypatch.undo()
                # The request waits for an encode worker; one comes.
                other = await start_worker(EncodeService(ToyEncoder(), KEY, identity=SAME))
                addresses = {"prefill": [it.prefills[0].address], "decode": [it.decodes[0].address]}
                it.engine.set_workers(**addresses, encode=[other.address])
                assert (await asked).tokens == tokens[0]
                assert (await ask(it.engine, dog)).tokens == tokens[1]
                assert client.counters()["pictures_failed"] == 1
                await it.engine.drain(other.address)
                await other.end()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    run(body())


# -- a picture that cannot be encoded -----------------------------------------------------------


def test_a_picture_that_fails_on_two_workers_is_refused_and_its_neighbours_are_not(stands_still):
    good, bad = seen("a", 1), seen("b", 2, mark=SICK)
    (tokens,) = expected(good)

    async def body():
        encoders = [ToyEncoder(hold=True), ToyEncoder(hold=True)]
        async with seeing(*encoders) as it:
            asked = [asyncio.create_task(ask(it.engine, one)) for one in (good, bad)]
            await until(
                lambda: (
                    all(it.encode(i).unfinished() for i in (0, 1))
                    or any(e.entered.is_set() for e in encoders)
                )
            )
            for encoder in encoders:
                encoder.gate.set()
            assert (await asked[0]).tokens == tokens
            with pytest.raises(RequestError, match=r"by 2 encode workers.*cannot be encoded"):
                await asked[1]
            assert sum(it.counters(i)["encode_failures"] for i in (0, 1)) == 2
            # It is remembered: sent again, no worker is asked.
            before = [it.counters(i)["encode_pictures_asked"] for i in (0, 1)]
            with pytest.raises(RequestError, match="by 2 encode workers"):
                await ask(it.engine, replace(bad, request_id="c"))
            assert [it.counters(i)["encode_pictures_asked"] for i in (0, 1)] == before
            await no_other_notices(it)

    run(body())


def test_where_one_worker_is_all_a_sick_picture_is_no_fault_of_the_request(stands_still):
    async def body():
        async with seeing(ToyEncoder()) as it:
            with pytest.raises(EngineUnavailable, match="cannot be encoded") as told:
                await ask(it.engine, seen("a", 1, mark=SICK))
            assert told.value.retry_after_s > 0
            assert it.counters()["encode_failures"] == 1  # not once for each attempt

    run(body())


def test_a_picture_that_ends_processes_ends_two_and_no_prefill_worker():
    async def body():
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable, str(SCRIPT), "0",
                stdout=asyncio.subprocess.PIPE, env={**os.environ, "TOY_CLUSTER_KEY": KEY.decode()},
            )
            for _ in range(3)
        ]  # fmt: skip
        try:
            there = [(await p.stdout.readline()).decode().strip() for p in processes]
            async with seeing(
                addresses=there, runner=toy_with_tower, encoding="either", recovery_s=60.0
            ) as it:
                with pytest.raises(RequestError, match="by 2 encode workers"):
                    await ask(it.engine, seen("a", 1, mark=POISON))
                await until(lambda: sum(p.returncode is not None for p in processes) == 2)
                assert sorted(p.returncode or 0 for p in processes) == [-9, -9, 0]
                assert (await ask(it.engine, seen("b", 2))).reason == "length"
                await no_other_notices(it)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    run(body())


# -- nobody there, or not for this --------------------------------------------------------------


def test_without_an_encode_worker_pictures_are_refused_and_it_says_so():
    async def body():
        async with seeing() as it:
            with pytest.raises(EngineUnavailable, match="no encode worker is ready") as told:
                await ask(it.engine, seen("a", 1))
            assert told.value.retry_after_s > 0
            (problem,) = await it.engine.problems()
            assert "no encode worker of its model" in problem
            # It is no fault of the prefill worker.
            (prefill,) = [w for w in await it.engine.status() if w.role == "prefill"]
            assert prefill.counters["router_failures"] == 0
            assert prefill.gauges["router_breaker_open"] == 0
            await no_other_notices(it)

    run(body())


def test_a_tower_of_its_own_steps_in_where_that_is_allowed():
    cat = seen("a", 1)
    (tokens,) = expected(cat)

    async def body():
        async with seeing(runner=toy_with_tower, encoding="either") as it:
            assert (await ask(it.engine, cat)).tokens == tokens
            assert it.asked()["pictures_encoded_here"] == 1
            assert await it.engine.problems() == []

    run(body())


def test_what_failed_elsewhere_is_not_tried_in_the_prefill_worker(stands_still):
    async def body():
        async with seeing(ToyEncoder(), runner=toy_with_tower, encoding="either") as it:
            with pytest.raises(EngineUnavailable, match="cannot be encoded"):
                await ask(it.engine, seen("a", 1, mark=SICK))
            assert it.asked()["pictures_encoded_here"] == 0

    run(body())


def test_a_worker_of_another_checkpoint_is_not_asked_and_would_refuse():
    async def body():
        other = ModelIdentity("another", "float64")
        async with seeing(ToyEncoder(), identity=other) as it:
            with pytest.raises(EngineUnavailable, match="no encode worker is ready"):
                await ask(it.engine, seen("a", 1))
            assert it.counters()["encode_pictures_asked"] == 0

    run(body())


def test_a_draining_worker_gets_no_new_pictures_and_ends_those_it_has():
    cat, dog = seen("a", 1), seen("b", 2)
    (tokens,) = expected(cat)

    async def body():
        encoder = ToyEncoder(hold=True)
        async with seeing(encoder) as it:
            asked = asyncio.create_task(ask(it.engine, cat))
            await until(encoder.entered.is_set)
            await it.engine.drain(it.encoders[0].address)
            with pytest.raises(EngineUnavailable, match="no encode worker is ready"):
                await ask(it.engine, dog)
            encoder.gate.set()
            assert (await asked).tokens == tokens
            assert it.counters()["encode_pictures_asked"] == 1

    run(body())
