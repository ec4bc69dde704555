"""The real server process: killed, stopped, disconnected from; its ledger against its clients."""

from __future__ import annotations

import gzip
import os
import random
import re
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_command import cli
from forked_command import start as start_command
from hostile_pages import HOSTILE
from service_harness import Reply, call, read_reply, request_bytes

from deepinfer_search_fetch.index.document import IndexedPage
from deepinfer_search_fetch.index.tantivy_backend import TantivyBackend
from deepinfer_search_fetch.service.metering import Ledger

Listener = Any  # see conftest
VOLES = {"query": "voles"}


class ServerProcess:
    """`search-fetch serve --no-auth` in a process of its own. workers: processes for pages."""

    def __init__(self, home: Path, *arguments: str, workers: int = 0) -> None:
        command = ("serve", "--no-auth", "--port", "0", "--home", str(home), *arguments)
        env = {"DEEPINFER_SEARCH_FETCH_EXTRACT_WORKERS": str(workers)}
        told, tells = os.pipe()
        self._stderr = os.fdopen(told)
        self.process = start_command(command, env, tells, tells)
        os.close(tells)
        self.log: list[str] = []
        self.port = 0
        for line in self._stderr:
            self.log.append(line)
            if found := re.search(r"serves on http://127\.0\.0\.1:(\d+)/", line):
                self.port = int(found.group(1))
                break
        assert self.port, "".join(self.log)
        self._reader = threading.Thread(target=self.log.extend, args=(self._stderr,))
        self._reader.start()

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            assert self.process.pid
            os.kill(self.process.pid, number)

    def kill(self, number: int = signal.SIGKILL) -> int | None:
        """Its exit code after this signal."""
        self.send_signal(number)
        self.process.join(60)
        self._reader.join()
        self._stderr.close()
        return self.process.exitcode


@pytest.fixture
def home(tmp_path: Path) -> Path:
    backend = TantivyBackend(tmp_path / "home" / "index")
    backend.index(
        [IndexedPage("https://a.example/", "Voles", "Voles live in grass. " * 20, "2026-01-01")]
    )
    backend.commit()
    (tmp_path / "home" / "service.toml").write_text("rate_per_second = 1e6\nrate_burst = 1000000\n")
    return tmp_path / "home"


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., ServerProcess]]:
    made: list[ServerProcess] = []

    def make(*arguments: str, workers: int = 0) -> ServerProcess:
        made.append(ServerProcess(home, *arguments, workers=workers))
        return made[-1]

    yield make
    for server in made:
        server.kill()


def rows_of(home: Path) -> dict[str, int]:
    """Ledger rows by the name the client gave its request."""
    ledger = Ledger(home / "ledger.sqlite3")
    found = ledger.read("SELECT request_id, COUNT(*) FROM ledger GROUP BY request_id")
    ledger.close()
    return {str(i).rpartition("-")[0]: int(n) for i, n in found}


@pytest.mark.parametrize("seed", [1, 2])
def test_after_kill_9_and_retries_the_ledger_is_exactly_what_clients_saw(
    seed: int, home: Path, start: Callable[..., ServerProcess]
) -> None:
    server = start()
    seen: set[str] = set()
    unanswered: list[str] = []
    enough = threading.Event()

    def ask(port: int, name: str) -> Reply:
        return call(port, "POST", "/v1/search", VOLES, X_Request_Id=name, Idempotency_Key=name)

    def client(number: int) -> None:
        choose = random.Random(f"{seed}/{number}")
        for n in range(10_000):
            name = f"c{number}n{n}"
            try:
                if choose.random() < 0.2:  # sends and leaves without a look at the answer
                    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
                        asked = request_bytes("POST", "/v1/search", {"query": "zzzz"})
                        connection.sendall(asked)
                    continue
                reply = ask(server.port, name)
            except OSError:
                unanswered.append(name)
                return
            if not reply.whole:
                unanswered.append(name)
                return
            assert reply.status == 200
            seen.add(name)
            if len(seen) > 40 * seed:
                enough.set()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    assert enough.wait(60)
    server.kill()
    for thread in threads:
        thread.join()
    ledger = Ledger(home / "ledger.sqlite3")
    ledger.recover()
    ledger.close()
    billed = rows_of(home)
    assert set(billed) <= seen | set(unanswered)
    assert len(seen - set(billed)) <= 4  # at most what was between its last byte and its mark
    again = start()
    for name in sorted(seen | set(unanswered)):
        reply = ask(again.port, name)
        assert reply.whole
        seen.add(name)
    again.kill()
    billed = rows_of(home)
    assert set(billed) == seen
    assert set(billed.values()) == {1}
    check = sqlite3.connect(home / "ledger.sqlite3")
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check.close()


def test_sigterm_lets_running_requests_finish(
    home: Path, site: Listener, start: Callable[..., ServerProcess]
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: socket.socket, data: bytes) -> None:
        if b"robots.txt" in data:
            connection.sendall(b"HTTP/1.1 404 No\r\nConnection: close\r\n\r\n")
            return
        entered.set()
        assert leave.wait(30)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<p>Voles in the grass.")

    site.behaviour = slow
    server = start("--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port))
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            request_bytes("POST", "/v1/fetch", {"url": f"http://127.0.0.2:{site.port}/"})
        )
        assert entered.wait(30)
        server.send_signal(signal.SIGTERM)
        leave.set()
        reply = read_reply(connection)
    assert (reply.status, reply.whole) == (200, True)
    server.process.join(60)
    assert server.process.exitcode == 0
    assert list(rows_of(home).values()) == [1]


def test_what_does_not_finish_in_time_gets_a_503(
    home: Path, site: Listener, start: Callable[..., ServerProcess]
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hung(connection: socket.socket, _: bytes) -> None:
        entered.set()
        leave.wait(60)

    site.behaviour = hung
    with (home / "service.toml").open("a") as file:
        file.write("shutdown_seconds = 1\n")
    server = start("--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port))
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            request_bytes("POST", "/v1/fetch", {"url": f"http://127.0.0.2:{site.port}/"})
        )
        assert entered.wait(30)
        server.send_signal(signal.SIGTERM)
        reply = read_reply(connection)
    leave.set()
    assert (reply.status, reply.json["error"]["code"]) == (503, "unavailable")
    server.kill(signal.SIGTERM)
    assert rows_of(home) == {}


def test_a_service_that_met_a_bomb_answers_the_next_request(
    site: Listener, start: Callable[..., ServerProcess]
) -> None:
    site.page("/bomb", HOSTILE["20,000 paragraphs"])
    site.page("/zip", gzip.compress(bytes(300_000_000), 1), headers=("Content-Encoding: gzip",))
    site.page("/fine", "<p>" + "Voles live in the grass of the meadow. " * 20)
    server = start("--allow-cidr", "127.0.0.2/32", "--allow-port", str(site.port), workers=1)
    base = f"http://127.0.0.2:{site.port}"
    bomb = call(server.port, "POST", "/v1/fetch", {"url": f"{base}/bomb"})
    if bomb.status == 200:
        assert "too_large" in bomb.json["extraction"]["warnings"]
    else:  # where others use the processors, pages at low priority come to an end at their limit
        assert (bomb.status, bomb.json["error"]["code"]) == (504, "timeout")
    refused = call(server.port, "POST", "/v1/fetch", {"url": f"{base}/zip"})
    assert refused.json["error"]["code"] == "decompression_bomb"
    fine = call(server.port, "POST", "/v1/fetch", {"url": f"{base}/fine"})
    assert (fine.status, "Voles" in fine.json["content"]) == (200, True)
    assert server.process.exitcode is None


def test_two_services_do_not_share_a_home(home: Path, start: Callable[..., ServerProcess]) -> None:
    start()
    second = cli("serve", "--no-auth", "--port", "0", home=home)
    assert second.returncode == 2
    assert "another service uses" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
