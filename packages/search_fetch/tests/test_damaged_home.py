"""A home folder with a damaged file: one error that names it, no traceback, no new start."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_command import cli

from deepinfer_search_fetch import AsyncSearchFetch, Config, SearchFetchError, SearchRequest
from deepinfer_search_fetch.index.authority import read_evidence, write_evidence
from deepinfer_search_fetch.index.linkgraph import LinkGraph
from deepinfer_search_fetch.index.sources.frontier import Frontier
from deepinfer_search_fetch.net.cache import PageCache
from deepinfer_search_fetch.service.auth import KeyStore
from deepinfer_search_fetch.service.metering import Ledger

GARBAGE = b"this is no database " * 500


def _cache(file: Path) -> None:
    PageCache(file.parent, 1000)


def _evidence(file: Path) -> None:
    read_evidence(file, "a.example")


def _import(file: Path) -> None:
    write_evidence(file, "own_graph", {})


def _frontier(file: Path) -> None:
    Frontier(file, 1)


@pytest.mark.parametrize(
    "opened", [_cache, KeyStore, Ledger, LinkGraph, _evidence, _import, _frontier]
)
def test_a_file_that_is_no_database_is_named_left_alone_and_closed(
    opened: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "index.sqlite3"
    file.write_bytes(GARBAGE)
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*values: Any, **more: Any) -> sqlite3.Connection:
        made.append(connect(*values, **more))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    with pytest.raises(SearchFetchError, match=r"index\.sqlite3 is damaged") as caught:
        opened(file)
    assert caught.value.code == "unavailable"
    assert not caught.value.retryable
    assert file.read_bytes() == GARBAGE
    for connection in made:
        with pytest.raises(sqlite3.ProgrammingError, match="closed"):
            connection.execute("SELECT 1")
    assert made


@pytest.mark.parametrize("name", ["meta.json", "generation.json"])
@pytest.mark.parametrize("content", ["", "garbage", "{}"])
def test_an_index_whose_own_records_are_damaged_is_named(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / "a.html").write_text("<title>Voles</title><p>" + "Voles live in grass. " * 20)

    async def fill() -> None:
        async with AsyncSearchFetch(Config(home=tmp_path, extract_workers=0)) as client:
            await client.ingest(tmp_path / "a.html")

    async def look() -> None:
        async with AsyncSearchFetch(Config(home=tmp_path, extract_workers=0)) as client:
            await client.search(SearchRequest(query="voles"))

    asyncio.run(fill())
    (tmp_path / "index" / name).write_text(content)
    with pytest.raises(SearchFetchError, match="index is damaged") as caught:
        asyncio.run(look())
    assert caught.value.code == "unavailable"


def test_the_command_prints_one_line(tmp_path: Path) -> None:
    (tmp_path / "keys.sqlite3").write_bytes(GARBAGE)
    done = cli("keys", "list", home=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "keys.sqlite3 is damaged" in done.stderr
