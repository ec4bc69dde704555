"""Rows are successes: a real server over sockets, killed with SIGKILL while answers end."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from deepinfer_engine.server.ledger import Ledger, read_usage
from deepinfer_engine.server.prices import PICOS

SCRIPT = Path(__file__).parents[2] / "support" / "ledger_server.py"
CLIENTS = 4
BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}


class Client(threading.Thread):
    """Asks until the server is gone. `whole`: answers that came to their end, id -> cost;
    `began`: ids of those that did not."""

    def __init__(self, url, number, progress):
        super().__init__()
        self.url, self.stream, self.progress = url, bool(number % 2), progress
        self.whole: dict[str, Decimal] = {}
        self.began: set[str] = set()
        self.cut_off = 0

    def run(self):
        try:
            with httpx.Client(base_url=self.url, timeout=60) as client:
                while True:
                    (self._stream if self.stream else self._body)(client)
                    self.progress.release()
        except (httpx.HTTPError, OSError):
            pass
        finally:
            self.progress.release()

    def _body(self, client):
        self.cut_off = 1  # until the body is here
        value = client.post("/v1/chat/completions", json=BODY).raise_for_status().json()
        self.cut_off = 0
        self.whole[value["id"]] = Decimal(value["usage"]["cost"])

    def _stream(self, client):
        body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
        current, cost = "", None
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    value = json.loads(line.removeprefix("data: "))
                    current = value["id"]
                    self.began.add(current)
                    if value.get("usage"):
                        cost = Decimal(value["usage"]["cost"])
                elif line == "data: [DONE]":
                    assert cost is not None
                    self.whole[current] = cost
                    self.began.discard(current)
                    return  # as many clients do: the end of the connection is not waited for


def run_and_kill(ledger: Path, answers: int) -> list[Client]:
    """One life of a server: clients ask it, and after so many answers it is killed."""
    server = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(ledger)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
    )
    try:
        url = server.stdout.readline().strip()
        progress = threading.Semaphore(0)
        clients = [Client(url, number, progress) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for _ in range(answers):
            progress.acquire()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        server.stdin.close()
        server.stdout.close()
    for client in clients:
        client.join()
    return clients


def rows_are_successes(ledger: Path, kills: int) -> None:
    chosen = random.Random(20)
    whole: dict[str, Decimal] = {}
    began: set[str] = set()
    unknown = 0
    for _ in range(kills):
        for client in run_and_kill(ledger, chosen.randint(1, 40)):
            whole |= client.whole
            began |= client.began
            unknown += client.cut_off
    Ledger(ledger).close()  # as the next start would: what was on its way is told apart
    with sqlite3.connect(ledger) as db:
        rows = {i: (state, cost) for i, state, cost in db.execute(
            "SELECT id, state, cost_picos FROM answers")}  # fmt: skip
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    states = Counter(state for state, _ in rows.values())
    assert states[0] == 0
    # No success without a row, at the price that the client was told.
    assert {i: Decimal(rows[i][1]) / PICOS for i in whole} == whole
    # No row that counts without a success. Of a body that was cut off nobody knows the id.
    counted = {i for i, (state, _) in rows.items() if state == 1}
    strangers = counted - whole.keys()
    assert not strangers & began
    assert len(strangers) <= unknown
    # Unsettled are answers that a kill met at their end, at most one a client each time.
    unsettled = {i for i, (state, _) in rows.items() if state == 2}
    assert len(unsettled) <= CLIENTS * kills
    (row,) = read_usage(ledger)
    assert row.answers == len(counted)
    assert row.unsettled == len(unsettled)
    assert row.cost_picos == sum(rows[i][1] for i in counted)


def test_rows_are_successes_when_a_server_is_killed(tmp_path):
    rows_are_successes(tmp_path / "ledger.db", 2)


@pytest.mark.slow
def test_rows_are_successes_over_twenty_kills(tmp_path):
    rows_are_successes(tmp_path / "ledger.db", 20)
