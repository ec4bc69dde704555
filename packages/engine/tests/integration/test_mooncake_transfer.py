"""Prompts between processes by Mooncake's transfer engine, the library itself, over its TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest
from toy_engine import BLOCK, KEY, alone, ask, greedy, prompt, request, run, until

from deepinfer_engine.router.remote import RemoteEngine

try:
    import mooncake.engine  # noqa: F401 - whether it loads is the question
except ImportError as missing:
    reason = f"the extra [mooncake] or libibverbs1 is missing: {missing}"
    pytest.skip(reason, allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "support" / "toy_worker.py"
LONG = 40 * BLOCK + 3
FIRST_WRITES = 5
"""Those that a worker makes before it is stuck, of 42 for such a prompt."""
ENDLESS = 10_000


@contextlib.asynccontextmanager
async def workers(tmp_path, *, pairs, writes):
    """An engine over so many workers of each role, and their processes by address."""
    them, addresses = {}, {"prefill": [], "decode": []}
    more = {
        "TOY_CLUSTER_KEY": KEY.decode(),
        "TOY_WRITES": str(writes),
        "TOY_STUCK": str(tmp_path / "stuck"),
    }
    try:
        for role in pairs * ("prefill", "decode"):
            cache = tmp_path / f"{role}-{len(them)}"
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(SCRIPT), role, "127.0.0.1:0", str(cache), "0"),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, **more},
            )
            them[role] = process  # until its address is known
            line = await process.stdout.readline()
            assert line, f"{role} did not start"
            addresses[role].append(line.decode().strip())
            them[addresses[role][-1]] = them.pop(role)
        engine = await RemoteEngine.connect(
            **addresses, cluster_key=KEY, ready_timeout_s=30.0, recovery_s=30.0
        )
        yield engine, them
        await engine.close()
    finally:
        for process in them.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


async def stuck_one(them):
    """The process that says it is stuck."""
    heard = {asyncio.ensure_future(one.stdout.readline()): one for one in them.values()}
    done, waiting = await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    (said,) = done
    assert said.result() == b"stuck\n"
    return heard[said]


def counted(engine, name):
    return sum(link.counters.get(name, 0) for link in engine._links.values())


def test_a_prompt_goes_from_process_to_process_and_says_what_it_says_alone(tmp_path):
    async def body():
        async with workers(tmp_path, pairs=1, writes=ENDLESS) as (engine, _):
            for i in range(3):
                answer = await ask(engine, request(f"r{i}", prompt(i, LONG + i)))
                assert answer.tokens == alone(prompt(i, LONG + i), greedy())
            # Both are told with the next heartbeat.
            await until(lambda: counted(engine, "transfer_remote_bytes"))
            assert counted(engine, "transfer_shared_bytes") == 0

    run(body())


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_kill_9_amid_the_units_of_a_prompt_has_it_go_by_others(tmp_path, victim):
    """Some units are written and announced, the others are not."""

    async def body():
        async with workers(tmp_path, pairs=2, writes=FIRST_WRITES) as (engine, them):
            asked = asyncio.ensure_future(ask(engine, request("r", prompt(1, LONG))))
            stuck = await stuck_one(them)
            assert not asked.done()
            if victim == "decode":
                (holds,) = [
                    a for (role, a), link in engine._links.items() if role == victim and link.load
                ]
                stuck = them[holds]
            stuck.kill()
            assert (await asked).tokens == alone(prompt(1, LONG), greedy())

    run(body())


def test_serve_answers_the_same_by_writes_as_by_sockets(start):
    said = []
    for way in (("tcp",), ("mooncake", "--trust-transfer-network")):
        server = start("--dtype", "float64", "--transfer", *way).wait_ready()
        body = {
            "model": server.get("/v1/models").json()["data"][0]["id"],
            "temperature": 0,
            "max_tokens": 24,
            "messages": [{"role": "user", "content": "Where is the lamp? " * 60}],
        }
        said.append(server.post("/v1/chat/completions", body).json()["choices"])
    assert said[0] == said[1]
