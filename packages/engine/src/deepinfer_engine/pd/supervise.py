"""Child processes: start them, learn their address, restart them, and never leave one behind.

A child tells its parent one JSON object a line on standard output (`Notice`); everything else it
has to say goes to standard error. Its standard input is a pipe that the parent holds: end of file
there means that the parent is gone, however it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepinfer_engine.errors import CheckpointError, ConfigError, EngineError, EngineUnavailable
from deepinfer_engine.pd.quoting import quoted

log = logging.getLogger(__name__)

SUPERVISED_ENV = "DEEPINFER_SUPERVISED"
CLUSTER_KEY_ENV = "DEEPINFER_CLUSTER_KEY"
CONFIG_EXIT = 3

_PR_SET_PDEATHSIG = 1
_ORPHAN_GRACE_S = 10.0
SILENCE_S = 15.0
"""A child that beat and then was not heard for this long has stopped: it is killed and replaced. So
is one that does not beat yet, because it loads, if it is found stopped by a signal."""
_SECOND_LOOK_S = 1.0
STUCK_EXIT = 70
"""A worker ends itself with this when a step of its never will."""
_ENDING_S = 5.0
_MAX_LINE = 64 * 1024
_BACKOFF_FIRST_S = 0.2
_BACKOFF_MAX_S = 30.0
# A child that ran this long was healthy: its next failure starts from the shortest backoff again.
# Short, for one that is killed from outside now and then has to be back at once.
_HEALTHY_S = 3.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`argv` is complete but for `--listen ADDRESS`, which the supervisor adds."""

    name: str
    argv: Sequence[str]


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    address: str = "127.0.0.1:0"
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    last_address: str = ""
    """The one that others know it by."""
    beats: bool = False
    bound: bool = False
    """Whether the present run told an address."""
    restarts: int = 0
    trouble: str = ""
    """Why it does not run now; empty while it does."""
    failure: EngineError | None = None
    watcher: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class Supervisor:
    """Keeps one process for each spec running, each at the address it first bound."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        environ: Mapping[str, str] | None = None,
        on_notice: Callable[[str, dict[str, Any]], None] = lambda name, notice: None,
        on_trouble: Callable[[str, str, str], None] = lambda name, address, text: None,
        silence_s: float = SILENCE_S,
        backoff_s: float = _BACKOFF_FIRST_S,
        host: str = "127.0.0.1",
    ) -> None:
        """`on_notice` hears every notice of every child: for progress displays. `on_trouble` hears
        (name, address, text) when a child does not run, and an empty text when it does again.
        `host`: where the children listen, on ports that they choose."""
        self._anywhere = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._on_trouble = on_trouble
        self._silence_s = silence_s
        self._backoff_s = backoff_s
        self._children = [_Child(spec, address=self._anywhere) for spec in specs]
        self._environ = {
            **(os.environ if environ is None else environ),
            SUPERVISED_ENV: str(os.getpid()),
        }
        self._on_notice = on_notice
        self._stopping = False

    async def start(self, timeout_s: float) -> dict[str, str]:
        """Start all and wait until each has told its address; returns them by name.

        Raises what a child reported (ConfigError, CheckpointError) or EngineUnavailable when one
        died without a word or is not ready in time. Then none is left running.
        """
        try:
            for child in self._children:
                child.watcher = asyncio.create_task(self._watch(child))
            waits = [asyncio.create_task(self._first_ready(child)) for child in self._children]
            try:
                async with asyncio.timeout(timeout_s):
                    await asyncio.gather(*waits)
            except TimeoutError:
                late = [child.spec.name for child in self._children if not child.ready.is_set()]
                raise EngineUnavailable(
                    f"not ready after {timeout_s:g} s: {', '.join(late)}"
                ) from None
            finally:
                for wait in waits:
                    wait.cancel()
        except BaseException:
            await self.kill()
            raise
        return {child.spec.name: child.address for child in self._children}

    def pids(self) -> dict[str, int]:
        """Process ids of the children that are alive, by name."""
        return {
            c.spec.name: c.process.pid for c in self._children if c.process is not None and c.alive
        }

    def restarts(self) -> dict[str, int]:
        """How often each child had to be started again."""
        return {child.spec.name: child.restarts for child in self._children}

    def troubles(self) -> dict[str, str]:
        """Why children do not run, by name; those that do are not in it."""
        return {child.spec.name: child.trouble for child in self._children if child.trouble}

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, wait for them to drain and flush, SIGKILL what is left after `grace_s`."""
        self._signal_all(signal.SIGTERM)
        running = [
            asyncio.create_task(c.process.wait()) for c in self._children if c.process and c.alive
        ]
        if running:
            await asyncio.wait(running, timeout=grace_s)
            for wait in running:
                wait.cancel()
        await self.kill()

    async def kill(self) -> None:
        """SIGKILL every child and reap it."""
        self._signal_all(signal.SIGKILL)
        for child in self._children:
            if child.watcher is not None:
                child.watcher.cancel()
                await asyncio.wait({child.watcher})
            if child.process is not None:
                await _gone(child.process)

    def _signal_all(self, number: signal.Signals) -> None:
        self._stopping = True
        for child in self._children:
            if child.process is not None and child.alive:
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(number)

    async def _first_ready(self, child: _Child) -> None:
        assert child.watcher is not None
        ready = asyncio.create_task(child.ready.wait())
        await asyncio.wait({ready, child.watcher}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not child.ready.is_set():
            raise child.failure or EngineUnavailable(f"the {child.spec.name} process did not start")

    async def _watch(self, child: _Child) -> None:
        """Run a child again and again. Nothing that goes wrong with one run ends this."""
        loop = asyncio.get_running_loop()
        backoff = self._backoff_s
        while not self._stopping:
            began = loop.time()
            try:
                await self._run_once(child)
                assert child.process is not None
                why = f"the {child.spec.name} process ended with code {child.process.returncode}"
            except OSError as error:
                why = f"the {child.spec.name} process cannot be started: {error.strerror or error}"
            except Exception as error:
                log.exception(
                    "watching the %s process failed; it is started again", child.spec.name
                )
                why = f"the {child.spec.name} process could not be watched: {error!r}"
                await self._end(child)
            if self._stopping:
                return
            if child.failure is not None and not child.ready.is_set():
                return  # it never worked, and says itself that it never will: `start` tells
            if child.process is not None and not child.ready.is_set() and not child.alive:
                child.failure = EngineUnavailable(f"{why} before it was ready")
                return
            if loop.time() - began > _HEALTHY_S:
                backoff = self._backoff_s
            if not child.bound:
                # Somebody else may have taken the port meanwhile; `on_notice` tells the new
                # address.
                child.address = self._anywhere
            if child.failure is not None:
                why = f"{why} ({child.failure})"
            self._tell(child, f"{why}; it is started again in {backoff:.1f} s")
            child.failure = None
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _BACKOFF_MAX_S)
            child.restarts += 1

    def _tell(self, child: _Child, trouble: str) -> None:
        if trouble:
            log.error("%s", trouble)
        child.trouble = trouble
        self._on_trouble(child.spec.name, child.last_address, trouble)

    async def _end(self, child: _Child) -> None:
        """Make sure that a run is over."""
        if child.process is not None and child.alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await _gone(child.process)

    async def _run_once(self, child: _Child) -> None:
        child.bound = False
        child.process = None
        child.process = process = await asyncio.create_subprocess_exec(
            *child.spec.argv,
            "--listen",
            child.address,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environ,
            # Ctrl-C in a terminal signals the whole process group; the parent alone decides on
            # draining.
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = _Lines()
        while True:
            data = await self._heard(process.stdout)
            if data is None and not child.beats and not _stopped(process.pid):
                continue  # loading may take its time
            if data is None:
                log.error(
                    "the %s process has said nothing for %g s; it is killed",
                    child.spec.name,
                    self._silence_s,
                )
                break
            if not data:
                # It has ended, or soon will: its exit code says how.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ENDING_S):
                        await process.wait()
                break
            for line in lines.feed(data):
                self._hear(child, line)
        child.beats = False
        await self._end(child)
        await _gone(process)

    async def _heard(self, pipe: asyncio.StreamReader) -> bytes | None:
        """What a child wrote, empty at its end; None when it was silent for too long."""
        # A second look: where this process was held up itself, the words lie there already.
        for seconds in (self._silence_s, _SECOND_LOOK_S):
            try:
                async with asyncio.timeout(seconds):
                    return await pipe.read(_MAX_LINE)
            except TimeoutError:
                continue
        return None

    def _hear(self, child: _Child, line: bytes) -> None:
        notice = _parse(line)
        if notice is None:
            log.warning("%s: %s", child.spec.name, quoted(line.decode(errors="replace").rstrip()))
            return
        if notice["event"] == "beat":
            child.beats = True
            return
        if notice["event"] == "ready":
            child.address = child.last_address = str(notice["address"])
            child.bound = True
            child.ready.set()
            if child.trouble:
                self._tell(child, "")
        elif notice["event"] == "failed":
            child.failure = _failure(notice)
        self._on_notice(child.spec.name, notice)


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process that nobody listens to any more.

    What it left in its pipe is read meanwhile: asyncio takes a process for ended when its pipes
    are, and stops reading one that nobody empties.
    """
    pipe = process.stdout
    assert pipe is not None

    async def empty() -> None:
        while await pipe.read(_MAX_LINE):
            pass

    emptying = asyncio.create_task(empty())
    try:
        await process.wait()
    finally:
        emptying.cancel()


def _stopped(pid: int) -> bool:
    """Whether a signal holds a process; False where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in (b"T", b"t")


class _Lines:
    """Bytes of a pipe as lines; of one that is too long its beginning, once."""

    def __init__(self) -> None:
        self._rest = b""
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if whole and self._skipping:
            whole, self._skipping = whole[1:], False
        if len(self._rest) > _MAX_LINE:
            if not self._skipping:
                whole.append(self._rest[:200] + b"... (a line without end)")
            self._rest, self._skipping = b"", True
        return whole


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        notice = json.loads(line)
    except ValueError:
        return None
    return notice if isinstance(notice, dict) and isinstance(notice.get("event"), str) else None


def _failure(notice: Mapping[str, Any]) -> EngineError:
    message = str(notice.get("message", "failed without a message"))
    kinds = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}
    return kinds.get(str(notice.get("kind")), EngineUnavailable)(message)


_telling = threading.Lock()


def notify(event: str, **details: Any) -> None:
    """In a child: tell the parent (or whoever reads standard output) one thing, from any thread."""
    with _telling:
        sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
        sys.stdout.flush()


def beat(trouble: str) -> None:
    """In a child, twice a second from a thread of its own: it lives. Or a step of its never will
    end: then it ends itself, to be replaced."""
    if trouble:
        with contextlib.suppress(OSError):
            notify("failed", kind="EngineLost", message=trouble)
        os._exit(STUCK_EXIT)
    notify("beat")


def supervised() -> bool:
    """Whether a supervisor started this process."""
    return SUPERVISED_ENV in os.environ


def die_with_parent() -> None:
    """In a child: end when the parent is gone. Call it first thing, from the main thread.

    Two ways, since each has a gap: the kernel's parent-death signal (Linux; lost if the parent died
    before this call) and end of file on standard input (needs a running interpreter).
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    threading.Thread(target=_end_at_eof, name="parent-watch", daemon=True).start()


def _end_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # A step that never ends would keep the signal handler from running: leave anyway.
    threading.Event().wait(_ORPHAN_GRACE_S)
    os._exit(1)


def cluster_key_from_environ(environ: Mapping[str, str]) -> bytes | None:
    """The key that workers and router share; hexadecimal in the environment, never in arguments."""
    text = environ.get(CLUSTER_KEY_ENV)
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < 16:
        raise ConfigError(f"{CLUSTER_KEY_ENV} must be at least 32 hexadecimal digits")
    return key
