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


BEATS = """
    import os, signal, sys, time
    from deepinfer_engine.pd.supervise import beat, die_with_parent, notify
    die_with_parent()
    notify("ready", address="127.0.0.1:4711")
    beat("")
    {then}
    while True:
        beat("")
        time.sleep(0.05)
"""


def restarted(code, *, times=1, **options):
    """Run a child until it has been started again: how often it was, and what was told."""

    async def go():
        started, troubles, again = 0, [], asyncio.Event()

        def hear(name, notice):
            nonlocal started
            started += notice["event"] == "ready"
            if started > times:
                again.set()

        supervisor = Supervisor(
            [child(code)],
            on_notice=hear,
            on_trouble=lambda name, address, text: troubles.append((address, text)),
            backoff_s=0.01,
            **options,
        )
        await supervisor.start(60)
        await asyncio.wait_for(again.wait(), 60)
        restarts = supervisor.restarts()["w"]
        await supervisor.kill()
        return restarts, troubles

    return asyncio.run(go())


def test_a_line_without_end_on_a_child_s_output_changes_nothing():
    long = BEATS.format(then="sys.stdout.write('x' * 300_000); sys.stdout.flush(); sys.exit(1)")
    restarts, troubles = restarted(long, times=2)
    assert restarts >= 2
    assert troubles[0][0] == "127.0.0.1:4711"
    assert "ended with code 1" in troubles[0][1]
    assert troubles[1] == ("127.0.0.1:4711", "")


def test_output_that_nobody_reads_does_not_keep_a_killed_child(monkeypatch, tmp_path):
    """A pipe that is full when the end comes: asyncio no longer reads it."""
    written = tmp_path / "written"
    # asyncio reads no more than two and a piece; the pipe holds another one
    chunk, paused_after = 1 << 16, 3
    code = BEATS.format(
        then=f"""
    for i in range(64):
        os.write(1, b"x" * {chunk})
        with open({str(written)!r}, "a") as file: file.write(".")
    """
    )
    real, reads = asyncio.StreamReader.read, True

    async def read(pipe, size=-1):
        if not reads:
            await asyncio.Event().wait()
        return await real(pipe, size)

    async def go():
        nonlocal reads

        def hear(name, notice):
            nonlocal reads
            reads = False

        supervisor = Supervisor([child(code)], on_notice=hear)
        await supervisor.start(60)
        async with asyncio.timeout(60):
            while not written.exists() or written.stat().st_size < paused_after:
                await asyncio.sleep(0.01)
        reads = True  # for whoever reads from now on
        await asyncio.wait_for(supervisor.kill(), 60)
        assert supervisor.pids() == {}

    monkeypatch.setattr(asyncio.StreamReader, "read", read)
    asyncio.run(go())


def test_starts_that_fail_are_tried_for_ever_and_told(monkeypatch):
    """No files, no memory, no processes: the next start may work."""
    real, failures = asyncio.create_subprocess_exec, []

    async def failing(*argv, **kwargs):
        if 1 <= len(failures) < 7:
            failures.append(argv)
            raise OSError(24, "Too many open files")
        failures.append(argv)
        return await real(*argv, **kwargs)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)
    restarts, troubles = restarted(BEATS.format(then="sys.exit(1)"))
    assert restarts >= 1
    assert len([text for _, text in troubles if "Too many open files" in text]) == 6


def test_a_first_start_that_fails_is_tried_until_the_time_is_over(monkeypatch):
    tried = []

    async def failing(*argv, **kwargs):
        tried.append(argv)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", failing)

    async def go():
        supervisor = Supervisor([child(WELL)], backoff_s=0.001)
        with pytest.raises(EngineUnavailable, match="not ready"):
            await supervisor.start(0.5)
        return supervisor.troubles()

    assert "Cannot allocate memory" in asyncio.run(go())["w"]
    assert len(tried) > 1


def test_a_fault_of_the_watcher_itself_does_not_end_it(monkeypatch):
    broken = []
    real = Supervisor._hear

    def hear(self, child, line):
        real(self, child, line)
        if b"beat" in line and not broken:
            broken.append(True)
            raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Supervisor, "_hear", hear)
    restarts, troubles = restarted(BEATS.format(then=""))
    assert restarts >= 1
    assert "a fault of ours" in troubles[0][1]


def test_a_child_that_was_stopped_is_killed_and_replaced():
    once = BEATS.format(then="os.kill(os.getpid(), signal.SIGSTOP)")
    restarts, troubles = restarted(once, silence_s=0.3)
    assert restarts >= 1
    assert "code -9" in troubles[0][1]


def test_a_child_that_was_stopped_before_it_ever_beat_is_replaced_too():
    early = """
        import os, signal, time
        from deepinfer_engine.pd.supervise import die_with_parent, notify
        die_with_parent()
        notify("ready", address="127.0.0.1:4711")
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)
    """
    restarts, troubles = restarted(early, silence_s=0.3)
    assert restarts >= 1
    assert "code -9" in troubles[0][1]


def test_a_child_whose_step_stands_still_ends_itself_and_says_why():
    restarts, troubles = restarted(BEATS.format(then="beat('a step has stood still for 9 s')"))
    assert restarts >= 1
    assert "code 70" in troubles[0][1]
    assert "stood still for 9 s" in troubles[0][1]


def test_a_child_that_loads_for_long_is_not_taken_for_a_stopped_one():
    slow = """
        import sys, time
        from deepinfer_engine.pd.supervise import beat, die_with_parent, notify
        die_with_parent()
        notify("loading")
        time.sleep(2.5)
        notify("ready", address="127.0.0.1:4711")
        while True:
            beat("")
            time.sleep(0.05)
    """

    async def go():
        supervisor = Supervisor([child(slow)], silence_s=0.3)
        await supervisor.start(60)
        restarts = supervisor.restarts()
        await supervisor.kill()
        return restarts

    assert asyncio.run(go()) == {"w": 0}


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
