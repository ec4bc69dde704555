"""Workers as real processes: killed without warning, restarted, drained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from toy_engine import BLOCK, KEY, alone, ask, greedy, prompt, request, run, until

from deepinfer_engine.core.types import TokensEvent
from deepinfer_engine.router.remote import RemoteEngine

SCRIPT = Path(__file__).parents[2] / "support" / "toy_worker.py"
ENDLESS = greedy(1500, ignore_eos=True)


class Processes:
    """Worker processes by role; every one of them is reaped at the end."""

    def __init__(self, cache_dir):
        self.cache_dir = cache_dir
        self.all = []
        self.by_role = {}
        self.addresses = {"prefill": "127.0.0.1:0", "decode": "127.0.0.1:0"}

    async def start(self, role, *, delay_s=0.0):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(SCRIPT),
            role,
            self.addresses[role],
            str(self.cache_dir),
            str(delay_s),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "TOY_CLUSTER_KEY": KEY.decode()},
        )
        self.all.append(process)
        self.by_role[role] = process
        line = await process.stdout.readline()
        assert line, f"the {role} worker did not start"
        self.addresses[role] = line.decode().strip()

    async def kill(self, role, number=signal.SIGKILL):
        self.by_role[role].send_signal(number)
        return await self.by_role[role].wait()

    async def engine(self):
        return await RemoteEngine.connect(
            prefill=[self.addresses["prefill"]],
            decode=[self.addresses["decode"]],
            cluster_key=KEY,
            ready_timeout_s=30.0,
        )


@contextlib.asynccontextmanager
async def processes(cache_dir, *, delay_s=0.0):
    them = Processes(cache_dir)
    try:
        await asyncio.gather(them.start("prefill"), them.start("decode", delay_s=delay_s))
        yield them
    finally:
        for process in them.all:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


def test_kill_9_of_decode_holds_its_streams_up_until_it_is_back(tmp_path):
    sampling = greedy(80, ignore_eos=True)

    async def body():
        async with processes(tmp_path, delay_s=0.01) as them:
            engine = await them.engine()
            streams = [engine.generate(request(f"r{i}", prompt(i, 20), sampling)) for i in range(3)]
            said = [list((await anext(stream)).token_ids) for stream in streams]
            await them.kill("decode")

            async def rest(at):
                async for event in streams[at]:
                    if isinstance(event, TokensEvent):
                        said[at] += event.token_ids

            waiting = [asyncio.create_task(rest(at)) for at in range(3)]
            await until(lambda: not engine._candidates("decode"))
            await them.start("decode")
            await asyncio.gather(*waiting)
            assert said == [alone(prompt(i, 20), sampling) for i in range(3)]
            await engine.close()

    run(body())


def test_kill_9_of_prefill_leaves_running_streams_alone(tmp_path):
    async def body():
        async with processes(tmp_path, delay_s=0.002) as them:
            engine = await them.engine()
            sampling = greedy(120, ignore_eos=True)
            stream = engine.generate(request("r", prompt(1, 20), sampling))
            tokens = []
            async for event in stream:
                if isinstance(event, TokensEvent):
                    if len(tokens) < 5 <= len(tokens) + len(event.token_ids):
                        await them.kill("prefill")
                    tokens += event.token_ids
            assert tokens == alone(prompt(1, 20), sampling)
            await engine.close()

    run(body())


def test_what_was_flushed_is_hit_after_kill_9_of_everything(tmp_path):
    first = prompt(1, 4 * BLOCK + 1)
    sampling = greedy(3 * BLOCK, ignore_eos=True)

    async def body():
        async with processes(tmp_path) as them:
            engine = await them.engine()
            one = await ask(engine, request("one", first, sampling))
            await engine.flush()
            await asyncio.gather(them.kill("prefill"), them.kill("decode"))
            await engine.close()
            await asyncio.gather(them.start("prefill"), them.start("decode"))
            engine = await them.engine()
            second = [*first, *one.tokens, 1, 2]
            two = await ask(engine, request("two", second, sampling))
            assert two.tokens == alone(second, sampling)
            assert two.cached == (len(first) + len(one.tokens) - 1) // BLOCK * BLOCK
            await engine.close()

    run(body())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_stream_finish_and_then_ends_the_process(tmp_path, number):
    async def body():
        async with processes(tmp_path, delay_s=0.005) as them:
            engine = await them.engine()
            sampling = greedy(60, ignore_eos=True)
            stream = engine.generate(request("r", prompt(1, 20), sampling))
            tokens = list((await anext(stream)).token_ids)
            ended = asyncio.create_task(them.kill("decode", number))
            async for event in stream:
                if isinstance(event, TokensEvent):
                    tokens += event.token_ids
            assert tokens == alone(prompt(1, 20), sampling)
            assert await ended == 0
            await engine.close()

    run(body())
