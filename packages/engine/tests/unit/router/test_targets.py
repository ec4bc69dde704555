"""What a decode worker says of its time for a token, and what the router makes of it."""

from __future__ import annotations

import asyncio

from toy_engine import alone, ask, cluster, greedy, hear, prompt, request, run, until

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.targets import StepTimes

ENDLESS = greedy(1500, ignore_eos=True)


class Known(StepTimes):
    """A machine of which it is known that a step takes a second for each position."""

    def saw(self, positions, context, seconds):
        pass

    def seconds(self, positions, context):
        return float(positions)


def slow(worker):
    worker.service.loop.scheduler.at.tokens.times = Known()
    worker.service.loop.scheduler.at.tokens.nextn = 0


def runs(worker):
    return worker.service.loop.scheduler.at.active()


def test_what_would_be_late_goes_to_another_worker_and_waits_where_there_is_none():
    """One sequence takes a second for each token, two take longer than the second and a half."""

    async def body():
        async with cluster(decodes=2, decode_config=EngineConfig(token_target_s=1.5)) as it:
            first, second = it.decodes
            slow(first)
            links = [link for (role, _), link in it.engine._links.items() if role == "decode"]
            by = {link.address: link for link in links}
            await until(lambda: by[first.address].gauges.get("token_room") == 1)
            streams = [
                it.engine.generate(request(f"r{i}", prompt(i, 20), ENDLESS)) for i in range(6)
            ]
            for stream in streams:
                await hear(stream, 1)
            assert (runs(first), runs(second)) == (1, 5)
            slow(second)
            await until(lambda: all(link.late for link in links))
            waits = asyncio.create_task(ask(it.engine, request("last", prompt(9, 20))))
            await until(lambda: any(w.service._queue for w in it.decodes))
            assert not waits.done()
            for stream in streams:
                await stream.aclose()
            assert (await waits).tokens == alone(prompt(9, 20), greedy())
            await until(it.idle)

    run(body())


def test_several_requests_between_two_reports_count():
    async def body():
        async with cluster(decodes=2, decode_config=EngineConfig(token_target_s=3.5)) as it:
            first, second = it.decodes
            for worker in it.decodes:
                slow(worker)
            links = [link for (role, _), link in it.engine._links.items() if role == "decode"]
            await until(lambda: all(link.gauges.get("token_room") == 3 for link in links))
            streams = [
                it.engine.generate(request(f"r{i}", prompt(i, 20), ENDLESS)) for i in range(6)
            ]
            await asyncio.gather(*(hear(stream, 1) for stream in streams))
            assert (runs(first), runs(second)) == (3, 3)
            for stream in streams:
                await stream.aclose()
            await until(it.idle)

    run(body())
