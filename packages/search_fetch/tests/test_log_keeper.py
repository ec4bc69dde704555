"""Whoever waits for an answer waits for no disk: logs are moved into their databases elsewhere."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_search_fetch import urls
from deepinfer_search_fetch.database import LogKeeper
from deepinfer_search_fetch.net.cache import PageCache
from deepinfer_search_fetch.net.chain import Page
from deepinfer_search_fetch.net.transport import Response
from deepinfer_search_fetch.service.metering import Charge, Ledger

ROWS = 700  # whose log is longer than what SQLite moves by itself


def write_ledger(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    ledger = Ledger(folder / "ledger.sqlite3")
    numbers = iter(range(10**6))

    def write() -> None:
        number = next(numbers)
        ledger.record(Charge(f"r{number}", "k", "fetch", 1, False, 10, 1, f"page {number}"))

    return folder / "ledger.sqlite3", write, ledger.close


def write_cache(folder: Path) -> tuple[Path, Callable[[], None], Callable[[], None]]:
    cache = PageCache(folder, 10**9)
    numbers = iter(range(10**6))
    url = urls.parse("http://voles.example/")

    def write() -> None:
        response = Response(url, 200, (("x-long", "x" * 3000),), b"voles", 5)
        cache.put(f"key {next(numbers)}", Page(url, response, ()), 60.0)

    return folder / "index.sqlite3", write, cache.close


PLACES = {"ledger": (write_ledger, "ledger"), "cache": (write_cache, "responses")}


def rows_in(database: Path, table: str) -> int:
    connection = sqlite3.connect(database)
    try:
        return int(connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()


@pytest.mark.parametrize("kind", PLACES)
def test_no_commit_moves_the_log(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(LogKeeper, "move", lambda _: asked.set())
    begin, _ = PLACES[kind]
    file, write, close = begin(tmp_path)
    for _ in range(ROWS):
        write()
    size = file.with_name(f"{file.name}-wal").stat().st_size
    assert size > 1200 * 4096  # SQLite's own limit is 1,000 pages, behind which it begins anew
    assert asked.wait(60)
    close()


@pytest.mark.parametrize("kind", PLACES)
def test_the_log_reaches_the_database_and_is_cut(kind: str, tmp_path: Path) -> None:
    begin, table = PLACES[kind]
    file, write, close = begin(tmp_path / "home" if kind == "cache" else tmp_path)
    log = file.with_name(f"{file.name}-wal")
    for _ in range(300):
        write()
    end = time.monotonic() + 60
    while log.stat().st_size and time.monotonic() < end:
        time.sleep(0.01)
        if log.stat().st_size:
            write()  # the next ones have the keeper look again
    apart = tmp_path / "apart.sqlite3"
    shutil.copy(file, apart)  # without its log
    assert rows_in(apart, table) >= 300
    before = rows_in(file, table)
    write()
    close()
    assert (rows_in(file, table), log.exists()) == (before + 1, False)


def test_who_reads_the_log_is_not_waited_for(tmp_path: Path) -> None:
    file, write, close = write_ledger(tmp_path)
    reader = sqlite3.connect(file)
    write()
    reader.execute("BEGIN")
    reader.execute("SELECT COUNT(*) FROM ledger").fetchone()
    for _ in range(300):
        write()
    reader.close()
    close()
    assert rows_in(file, "ledger") == 301
