"""A server on three raylets of this machine: any process but Ray's head may be killed.

Seconds until it answers again are printed (`-s`), not asserted: they are the machine's. Waits end
after two minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

ray = pytest.importorskip("ray", reason="the extra ray is not installed")

from deepinfer_engine.cli import main as cli  # noqa: E402
from deepinfer_engine.cli.cluster.control import connected, look  # noqa: E402

LONGEST_S = 120.0
SPEC = """
name = "trial"
address = "{address}"

[settings]
threads = 1
dtype = "float64"
cache_dir = "{cache}"
drain_timeout_s = 60

[router]
settings = {{ port = {port} }}

[prefill]
count = {prefill}

[decode]
count = {decode}
"""


def eventually(condition, what):
    end = time.monotonic() + LONGEST_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if value := condition():
                return value
        assert time.monotonic() < end, f"{what} did not come true"
        time.sleep(0.1)


class Streams:
    """A few answers in progress. `ended`: how each one did; None while it runs."""

    def __init__(self, url, number=3):
        self.ended = [None] * number
        self.begun = [threading.Event() for _ in range(number)]
        self.threads = [threading.Thread(target=self._run, args=(url, i)) for i in range(number)]
        for thread in self.threads:
            thread.start()
        for begun in self.begun:
            assert begun.wait(LONGEST_S)

    def _run(self, url, i):
        body = {
            "model": "deepinfer-demo", "stream": True, "max_tokens": 150, "ignore_eos": True,
            "messages": [{"role": "user", "content": f"Tell me story {i}."}],
        }  # fmt: skip
        how = "cut off"
        try:
            with httpx.stream(
                "POST", url + "/v1/chat/completions", json=body, timeout=LONGEST_S
            ) as reply:
                for line in reply.iter_lines():
                    self.begun[i].set()
                    if line == "data: [DONE]":
                        how = "whole"
                    elif line.startswith("data: {") and "error" in json.loads(line[6:]):
                        how = "told"
        except httpx.HTTPError:
            pass
        finally:
            self.begun[i].set()
            self.ended[i] = how

    def join(self):
        for thread in self.threads:
            thread.join(LONGEST_S)
        assert None not in self.ended, "a stream hangs"
        return self.ended


class Trial:
    def __init__(self, cluster, folder):
        self.cluster = cluster
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.file, self.cache = folder / "cluster.toml", folder / "kv"

    def up(self, *more, prefill=2, decode=2):
        text = SPEC.format(
            address=self.cluster.address, cache=self.cache, port=self.port,
            prefill=prefill, decode=decode,
        )  # fmt: skip
        self.file.write_text(text)
        assert cli.run(["up", str(self.file), *more]) == 0

    def processes(self):
        with connected(self.cluster.address) as joined:
            return {one["name"].removeprefix("trial/"): one for one in look(joined, "trial")}

    def settled(self, prefill=2, decode=2):
        """All that is wanted runs, and the router knows it."""

        def all_here():
            ready = [w["role"] for w in httpx.get(self.url + "/health").json()["workers"]
                     if w["ready"]]  # fmt: skip
            return (ready.count("prefill"), ready.count("decode")) == (prefill, decode)

        eventually(all_here, f"{prefill} prefill and {decode} decode workers")

    def answers(self):
        body = {
            "model": "deepinfer-demo", "max_tokens": 3,
            "messages": [{"role": "user", "content": "Hello!"}],
        }  # fmt: skip
        reply = httpx.post(self.url + "/v1/chat/completions", json=body, timeout=30)
        return reply.status_code == 200


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    from ray.cluster_utils import Cluster

    # A raylet that is killed is noticed within a few seconds instead of fifteen.
    system = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "_system_config": system, "include_dashboard": False},
    )
    for _ in range(2):
        cluster.add_node(num_cpus=8)
    try:
        trial = Trial(cluster, tmp_path_factory.mktemp("trial"))
        trial.up()
        trial.settled()
        yield trial
        command = Path(f"/proc/{trial.processes()['router/0']['pid']}/cmdline").read_bytes()
        settings = Path(command.split(b"\0")[-2].decode())
        assert settings.is_file()
        assert cli.run(["down", "--name", "trial", "--address", cluster.address]) == 0
        assert not settings.parent.exists(), "what a router is told stays behind"
        with pytest.raises(httpx.HTTPError):
            httpx.get(trial.url + "/health")
    finally:
        cluster.shutdown()


def test_status_shows_every_process(trial, capsys):
    assert trial.answers()
    assert cli.run(["status", "--name", "trial", "--address", trial.cluster.address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["processes"]
    roles = [one["role"] for one in found]
    assert roles == ["prefill", "prefill", "decode", "decode", "router"]
    assert len({one["pid"] for one in found}) == 5
    assert cli.run(["status", "--name", "nobody", "--address", trial.cluster.address]) == 4


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("prefill/0", "pid"), ("decode/0", "pid"), ("router/0", "pid"),
        ("prefill/1", "actor_pid"), ("decode/1", "actor_pid"), ("router/0", "actor_pid"),
        ("directory", "actor_pid"), ("raylet", "pid"),
    ],
)  # fmt: skip
def test_whatever_is_killed_service_comes_back_and_no_stream_hangs(trial, name, what):
    trial.settled()
    if name == "directory":
        with connected(trial.cluster.address) as joined:
            pid = joined.get(joined.get_actor("trial/directory").pid.remote())
    elif name == "raylet":
        node = (
            trial.cluster.worker_nodes
            and sorted(trial.cluster.worker_nodes, key=lambda n: n.node_id)[0]
        )
        pid = node.all_processes["raylet"][0].process.pid
    else:
        pid = trial.processes()[name][what]
    streams = Streams(trial.url)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(trial.answers, "an answer")
    back = time.monotonic() - began
    if name == "raylet":
        trial.cluster.add_node(num_cpus=8)
    trial.settled()
    whole = time.monotonic() - began
    ended = streams.join()
    print(f"\n{name} ({what}): answers after {back:.1f} s, whole after {whole:.1f} s; {ended}")
    if name not in ("router/0", "raylet"):
        assert ended == ["whole"] * len(ended)


def test_a_role_grows_and_shrinks(trial):
    trial.up(decode=3)
    trial.settled(decode=3)
    streams = Streams(trial.url)
    trial.up(prefill=1, decode=1)
    trial.settled(prefill=1, decode=1)
    assert streams.join() == ["whole"] * 3
    trial.up()
    trial.settled()
    assert trial.answers()


def test_a_rolling_restart_loses_no_stream(trial):
    before = trial.processes()
    streams = Streams(trial.url)
    trial.up("--restart", "decode")
    trial.up("--restart", "prefill")
    assert streams.join() == ["whole"] * 3
    trial.settled()
    after = trial.processes()
    for name in before:
        assert (before[name]["pid"] == after[name]["pid"]) == (name == "router/0"), name
