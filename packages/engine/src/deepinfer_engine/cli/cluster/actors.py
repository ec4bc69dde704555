"""What runs inside Ray: a directory of workers, and an actor for each process.

An actor owns its process: it starts it, starts it again when it ends or stops, and tells the
directory where it listens. Ray starts an actor again that died, elsewhere if its machine did; the
process of a dead actor ends with it. The directory remembers nothing that it is not told every
second, so that it may die, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from deepinfer_engine.pd.announcing import WORKER_ROLES
from deepinfer_engine.pd.supervise import CLUSTER_KEY_ENV, ChildSpec, Supervisor
from deepinfer_engine.settings import Settings

log = logging.getLogger(__name__)

TELL_S = 0.5
FORGET_S = 5.0
"""A worker that its actor has not named for so long is gone."""
_START_S = 300.0
_BACKOFF_S = 0.2
_END_S = 30.0
_PR_SET_PDEATHSIG = 1


class Directory:
    """Where the workers of a cluster are, by what their actors say."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, str, str]] = {}

    def tell(self, instance: str, role: str, address: str) -> None:
        """An instance listens there; an empty address: it does not listen now."""
        if address:
            self._told[instance] = self._clock(), role, address
        else:
            self._told.pop(instance, None)

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def members(self) -> dict[str, list[str]]:
        """Role -> addresses."""
        now = self._clock()
        self._told = {k: v for k, v in self._told.items() if now - v[0] < FORGET_S}
        found: dict[str, list[str]] = {role: [] for role in WORKER_ROLES}
        for _, role, address in sorted(self._told.values(), key=lambda told: told[2]):
            found[role].append(address)
        return found


class DirectoryActor(Directory):
    """The directory in Ray."""

    def __init__(self) -> None:
        _end_with_raylet()
        super().__init__()


class _Named:
    """The directory's actor as others reach it: by name, again whenever it is another one."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._handle: Any = None

    def call(self, method: str, *arguments: Any) -> Any:
        """The result, None where the directory cannot be reached now."""
        ray: Any = import_module("ray")  # an extra, and without types
        try:
            if self._handle is None:
                self._handle = ray.get_actor(f"{self._cluster}/directory")
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=3.0)
        except Exception as exc:
            log.info("the directory cannot be reached: %s", exc)
            self._handle = None
            return None


class Worker:
    """A prefill, decode or encode process."""

    def __init__(
        self, cluster: str, instance: str, role: str, settings: dict[str, Any], key: str
    ) -> None:
        from deepinfer_engine.cli.launch import worker_argv

        _end_with_raylet()
        self._instance, self._role = instance, role
        self._settings = Settings.model_validate(settings)
        self._argv = worker_argv(role, self._settings)
        self._environ = {**os.environ, CLUSTER_KEY_ENV: key}
        self._host = str(import_module("ray.util").get_node_ip_address())
        self._directory = _Named(cluster)
        self._address = ""
        self._restarts = 0
        self._supervisor: Supervisor | None = None
        self._loop = asyncio.new_event_loop()
        # For as long as the actor lives: the process ends when the thread does that started it.
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop)
        threading.Thread(target=self._telling, daemon=True).start()

    def state(self) -> dict[str, Any]:
        """What there is to see of it."""
        pids = {} if self._supervisor is None else self._supervisor.pids()
        troubles = {} if self._supervisor is None else self._supervisor.troubles()
        again = 0 if self._supervisor is None else sum(self._supervisor.restarts().values())
        return {
            "role": self._role,
            "address": self._address,
            "pid": pids.get(self._instance),
            "actor_pid": os.getpid(),
            "host": self._host,
            "trouble": troubles.get(self._instance, "") or ("" if self._address else "it starts"),
            "restarts": self._restarts + again,
        }

    def restart(self) -> str:
        """End the process, which finishes what it runs, and start another; returns its address."""
        self.stop()
        self._restarts += 1
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self._address

    def stop(self) -> None:
        """End the process, which finishes what it runs."""
        supervisor, self._supervisor = self._supervisor, None
        self._tell("")
        if supervisor is not None:
            grace = self._settings.drain_timeout_s + 5
            asyncio.run_coroutine_threadsafe(supervisor.stop(grace), self._loop).result()

    async def _start(self) -> None:
        def hear(name: str, notice: dict[str, Any]) -> None:
            if notice["event"] == "ready":
                self._address = str(notice["address"])

        def in_trouble(name: str, address: str, text: str) -> None:
            if text:
                self._address = ""

        while True:
            supervisor = self._supervisor = Supervisor(
                [ChildSpec(self._instance, self._argv)],
                environ=self._environ,
                on_notice=hear,
                on_trouble=in_trouble,
                host=self._host,
            )
            try:
                await supervisor.start(_START_S)
            except Exception:
                log.exception("%s could not be started; it is tried again", self._instance)
                await asyncio.sleep(5.0)
            else:
                return

    def _telling(self) -> None:
        while True:
            if self._address and self._supervisor is not None:
                self._directory.call("tell", self._instance, self._role, self._address)
            time.sleep(TELL_S)

    def _tell(self, address: str) -> None:
        self._address = address
        self._directory.call("tell", self._instance, self._role, address)


class Router:
    """A router process, which follows a file of workers that is written from the directory."""

    def __init__(
        self, cluster: str, instance: str, role: str, settings: dict[str, Any], key: str
    ) -> None:
        _end_with_raylet()
        self._instance = instance
        self._settings = Settings.model_validate(settings)
        self._host = str(import_module("ray.util").get_node_ip_address())
        self._directory = _Named(cluster)
        folder = Path(tempfile.mkdtemp(prefix="deepinfer-router-"))
        self._folder = folder
        self._workers, self._config = folder / "workers.toml", folder / "deepinfer.json"
        self._workers.write_text("", encoding="utf-8")
        self._environ = {**os.environ, CLUSTER_KEY_ENV: key}
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        self._stopping = threading.Event()
        self._follower = threading.Thread(target=self._following, daemon=True)
        self._follower.start()
        threading.Thread(target=self._running, daemon=True).start()

    def state(self) -> dict[str, Any]:
        process = self._process
        alive = process is not None and process.poll() is None
        return {
            "role": "router",
            "address": f"{self._settings.host}:{self._settings.port}" if alive else "",
            "pid": process.pid if alive and process is not None else None,
            "actor_pid": os.getpid(),
            "host": self._host,
            "trouble": "" if alive else "it starts",
            "restarts": self._restarts,
        }

    def restart(self) -> str:
        """End the process, which finishes what it answers; another one is started."""
        process = self._process
        if process is not None:
            process.terminate()
            process.wait()
        return self.state()["address"]

    def stop(self) -> None:
        self._stopping.set()
        process = self._process
        if process is not None:
            process.terminate()
            process.wait()
        self._follower.join(_END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _argv(self) -> list[str]:
        """The settings go as a file: most have no flag, and some are no business of others."""
        return [sys.executable, "-m", "deepinfer_engine.cli.cluster.router", str(self._config)]

    def _running(self) -> None:
        """Start the process again and again. It ends at once when this thread does."""
        changed = {"workers_file": self._workers, **dict.fromkeys(WORKER_ROLES, ())}
        settings = self._settings.model_copy(update=changed)
        self._config.touch(0o600)
        self._config.write_text(settings.model_dump_json(exclude_unset=False), encoding="utf-8")
        while not self._stopping.is_set():
            self._process = subprocess.Popen(
                self._argv(), env=self._environ, stdin=subprocess.DEVNULL, preexec_fn=_end_with_us
            )
            self._process.wait()
            self._restarts += 1
            self._stopping.wait(_BACKOFF_S)

    def _following(self) -> None:
        before = None
        while not self._stopping.is_set():
            found = self._directory.call("members")
            if found is not None and found != before:
                # A list of plain strings is the same in JSON and TOML.
                lines = [f"{role} = {json.dumps(found[role])}" for role in WORKER_ROLES]
                fresh = self._workers.with_suffix(".new")
                fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
                fresh.rename(self._workers)
                before = found
            self._stopping.wait(TELL_S)


def _end_with_raylet() -> None:
    """End this actor when the raylet that started it is gone. Ray sees that by the number 1 of its
    parent, which orphans do not have everywhere; another actor has its place by then."""
    raylet = os.getppid()

    def watch() -> None:
        while os.getppid() == raylet:
            time.sleep(TELL_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _end_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
