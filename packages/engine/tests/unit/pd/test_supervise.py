"""Child processes: real ones, made of a few lines of Python."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from deepinfer_engine.errors import CheckpointError, ConfigError, EngineUnavailable
from deepinfer_engine.pd.supervise import ChildSpec, Supervisor, cluster_key_from_environ

# A child that tells an address and then waits to be told to end.
WELL = """
    import signal, sys
    from deepinfer_engine.pd.supervise import die_with_parent, notify
    die_with_parent()
    address = sys.argv[sys.argv.index("--listen") + 1]
    notify("loading")
    notify("ready", address=address.replace(":0", ":4711"))
    signal.sigwait({signal.SIGTERM})
"""


def child(code, name="w"):
    return ChildSpec(name, [sys.executable, "-c", textwrap.dedent(code)])


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def test_start_returns_every_address_and_stop_ends_every_process():
    async def go():
        heard = []
        supervisor = Supervisor(
            [child(WELL, "p"), child(WELL, "d")],
            on_notice=lambda name, n: heard.append((name, n["event"])),
        )
        addresses = await supervisor.start(30)
        pids = supervisor.pids()
        await supervisor.stop(10)
        return addresses, pids, heard

    addresses, pids, heard = asyncio.run(go())
    assert addresses == {"p": "127.0.0.1:4711", "d": "127.0.0.1:4711"}
    assert set(pids) == {"p", "d"}
    assert not any(alive(pid) for pid in pids.values())
    assert ("p", "loading") in heard
    assert ("d", "ready") in heard


def test_a_killed_child_comes_back_on_the_address_it_had():
    async def go():
        again = asyncio.Event()
        told = []

        def hear(name, notice):
            if notice["event"] == "ready":
                told.append(notice["address"])
                if len(told) == 2:
                    again.set()

        supervisor = Supervisor([child(WELL)], on_notice=hear)
        await supervisor.start(30)
        first = supervisor.pids()["w"]
        os.kill(first, signal.SIGKILL)
        await asyncio.wait_for(again.wait(), 30)
        second, restarts = supervisor.pids()["w"], supervisor.restarts()
        await supervisor.stop(10)
        return first, second, told, restarts

    first, second, told, restarts = asyncio.run(go())
    assert first != second
    assert told == ["127.0.0.1:4711", "127.0.0.1:4711"]
    assert restarts == {"w": 1}


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError])
def test_what_a_child_reports_is_raised_and_nobody_is_left(kind):
    bad = f"""
        from deepinfer_engine.pd.supervise import notify
        notify("failed", kind="{kind.__name__}", message="tensor x is missing")
        raise SystemExit(3)
    """

    async def go():
        supervisor = Supervisor([child(WELL, "good"), child(bad, "bad")])
        with pytest.raises(kind, match="tensor x is missing"):
            await supervisor.start(30)
        return supervisor.pids()

    assert asyncio.run(go()) == {}


def test_a_child_that_dies_without_a_word_is_told_with_its_exit_code():
    async def go():
        supervisor = Supervisor([child("raise SystemExit(7)")])
        with pytest.raises(EngineUnavailable, match="code 7"):
            await supervisor.start(30)

    asyncio.run(go())


def test_a_child_that_never_gets_ready_is_named_and_killed():
    async def go():
        supervisor = Supervisor([child("import time; time.sleep(60)", "slow")])
        with pytest.raises(EngineUnavailable, match="slow"):
            await supervisor.start(0.3)
        return supervisor.pids()

    assert asyncio.run(go()) == {}


def test_a_child_that_ignores_sigterm_is_killed_after_the_grace():
    deaf = WELL.replace(
        "signal.sigwait({signal.SIGTERM})", "signal.signal(15, signal.SIG_IGN); signal.pause()"
    )
    # SIGTERM may come before the child ignores it, so it ignores it before it is ready.
    deaf = deaf.replace('notify("loading")', "signal.signal(15, signal.SIG_IGN)")

    async def go():
        supervisor = Supervisor([child(deaf)])
        await supervisor.start(30)
        pid = supervisor.pids()["w"]
        await supervisor.stop(0.2)
        return pid

    assert not alive(asyncio.run(go()))


def test_children_end_when_their_parent_is_killed():
    parent = textwrap.dedent(f"""
        import asyncio, sys
        from deepinfer_engine.pd.supervise import ChildSpec, Supervisor
        async def go():
            code = {textwrap.dedent(WELL)!r}
            supervisor = Supervisor([ChildSpec("w", [sys.executable, "-c", code])])
            await supervisor.start(30)
            print(supervisor.pids()["w"], flush=True)
            await asyncio.Event().wait()
        asyncio.run(go())
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    # Readable end of file on a pidfd is the end of the process: no polling, no sleeping.
    fd = os.pidfd_open(pid)
    process.kill()
    process.wait()
    process.stdout.close()

    async def gone():
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, ended.set)
        await asyncio.wait_for(ended.wait(), 15)

    asyncio.run(gone())
    os.close(fd)


@pytest.mark.parametrize("text", ["", "xyz", "ab" * 8])
def test_a_short_or_broken_cluster_key_is_refused(text):
    with pytest.raises(ConfigError, match="hexadecimal"):
        cluster_key_from_environ({"DEEPINFER_CLUSTER_KEY": text})


def test_the_cluster_key_comes_from_the_environment():
    assert cluster_key_from_environ({}) is None
    assert cluster_key_from_environ({"DEEPINFER_CLUSTER_KEY": "ab" * 16}) == b"\xab" * 16
