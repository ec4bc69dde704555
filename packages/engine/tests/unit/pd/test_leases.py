"""How long a prefill worker keeps a prompt that decode has not released: hand-driven clocks."""

from __future__ import annotations

import asyncio
import time

from toy_engine import BLOCK, cluster, prompt, request, run, until

from deepinfer_engine.errors import EngineError
from deepinfer_engine.pd.decode import HOLD_EVERY_S
from deepinfer_engine.pd.prefill import LEASE_MORE_S, LEASE_S


def test_decode_holds_what_waits_there_and_a_lease_that_nobody_extends_ends():
    async def body():
        async with cluster() as it:
            prefill, decode = it.prefills[0].service, it.decodes[0].service
            decode._start_if_ready = lambda attempt, peer: None  # its grammar takes for ever
            task = asyncio.create_task(drained(it.engine, request("r", prompt(1, 3 * BLOCK))))
            await until(lambda: any(job.lease_until for job in prefill._jobs.values()))
            await until(lambda: [a.stage.value for a in decode.landings] == ["ready"])
            (job,) = prefill._jobs.values()
            begun = time.monotonic()
            assert job.lease_until <= begun + LEASE_S
            job.lease_until = begun + 1.0
            decode.reap(begun + HOLD_EVERY_S)  # the timer comes by: every five seconds it tells
            await until(lambda: job.lease_until > begun + 1.0)
            held = job.lease_until
            assert held <= time.monotonic() + LEASE_MORE_S
            decode.reap(begun + HOLD_EVERY_S + 0.1)
            prefill.reap(held - 0.1)
            assert job in prefill._jobs.values(), "it is held"
            prefill.reap(held + 0.1)
            assert job not in prefill._jobs.values()
            await until(lambda: not [a for a in decode.landings if a.xid == job.xid])
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(it.idle)

    run(body())


async def drained(engine, asked):
    try:
        return [event async for event in engine.generate(asked)]
    except EngineError as error:
        return error
