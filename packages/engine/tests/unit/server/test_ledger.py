"""The ledger's file: what is on the disk when, who may write it, sums, and files that are none."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from dataclasses import replace

import pytest

from deepinfer_engine.cli import main as cli
from deepinfer_engine.errors import ConfigError, EngineUnavailable
from deepinfer_engine.server.ledger import Charge, Ledger, read_usage

ONE = Charge(
    "a-1", 1_700_000_000.0, "ana", "chat", "m", "stop", 100, 40, 10,
    "deepseek-flash", "peak", "USD", 6_000, 300_000, 1_200_000, 30_240_000,
)  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep" / "ledger.db"


def states(path):
    with sqlite3.connect(path) as db:
        return dict(db.execute("SELECT id, state FROM answers"))


def test_a_row_is_on_the_disk_before_begin_returns_and_marked_afterwards(path):
    async def go():
        ledger = Ledger(path)
        await ledger.begin(ONE)
        assert states(path) == {"a-1": 0}
        ledger.finish("a-1")
        await ledger.begin(replace(ONE, id="a-2"))
        ledger.void("a-2")
        await ledger.settled()
        assert states(path) == {"a-1": 1}
        await ledger.begin(replace(ONE, id="a-3"))
        ledger.finish("a-3")
        ledger.close()  # writes what is left

    asyncio.run(go())
    assert states(path) == {"a-1": 1, "a-3": 1}


def test_answers_that_end_together_share_a_commit(path):
    async def go():
        ledger = Ledger(path)
        commits = []
        write = ledger._write
        ledger._write = lambda works: (commits.append(len(works)), write(works))
        await asyncio.gather(*(ledger.begin(replace(ONE, id=f"a-{i}")) for i in range(50)))
        ledger.close()
        return commits

    assert sum(commits := asyncio.run(go())) == 50
    assert len(commits) <= 2


def test_what_was_on_its_way_when_a_server_died_is_told_apart_and_costs_nothing(path):
    async def begin():
        ledger = Ledger(path)
        await ledger.begin(ONE)
        await ledger.begin(replace(ONE, id="a-2"))
        ledger.finish("a-2")
        await ledger.settled()
        ledger._db.close()  # no word more of it, as if it were killed
        os.close(ledger._lock)

    asyncio.run(begin())
    Ledger(path).close()
    assert states(path) == {"a-1": 2, "a-2": 1}
    (row,) = read_usage(path)
    assert (row.answers, row.cost_picos, row.unsettled) == (1, ONE.cost_picos, 1)


def test_one_server_writes_a_ledger_at_a_time(path):
    first = Ledger(path)
    with pytest.raises(ConfigError, match="another server writes"):
        Ledger(path)
    assert read_usage(path) == []  # reading is free
    first.close()
    Ledger(path).close()


def test_a_row_that_cannot_be_written_refuses_its_answer(path):
    async def go():
        ledger = Ledger(path)
        await ledger.begin(ONE)
        with pytest.raises(EngineUnavailable, match="cannot be recorded"):
            await ledger.begin(ONE)  # the same id again
        assert ledger.failures == 1
        await ledger.begin(replace(ONE, id="a-2"))  # the next one is written
        ledger.close()

    asyncio.run(go())


def test_sums_beyond_64_bits_are_exact(path):
    big = 9 * 10**18

    async def go():
        ledger = Ledger(path)
        for i in range(3):
            await ledger.begin(replace(ONE, id=f"a-{i}", cost_picos=big + i))
        ledger.close()

    asyncio.run(go())
    (row,) = read_usage(path)
    assert row.cost_picos == 3 * big + 3


def test_groups_times_and_keys(path):
    day = 86_400

    async def go():
        ledger = Ledger(path)
        rows = [
            ONE,
            replace(ONE, id="b", at=ONE.at + day, protocol="messages"),
            replace(ONE, id="c", key="ben", currency="EUR", cost_picos=7),
        ]
        for row in rows:
            await ledger.begin(row)
        ledger.close()

    asyncio.run(go())
    assert [(r.group["key"], r.currency, r.answers) for r in read_usage(path)] == [
        ("ana", "USD", 2),
        ("ben", "EUR", 1),
    ]
    assert [r.group for r in read_usage(path, key="ana", by=("day", "protocol"))] == [
        {"day": "2023-11-14", "protocol": "chat"},
        {"day": "2023-11-15", "protocol": "messages"},
    ]
    assert sum(r.answers for r in read_usage(path, since=ONE.at, until=ONE.at + day)) == 2
    assert sum(r.answers for r in read_usage(path, since=ONE.at + 1)) == 1


def test_files_that_are_no_ledger_are_refused(tmp_path):
    text = tmp_path / "text"
    text.write_text("no database at all, " * 100)
    with pytest.raises(ConfigError, match="not a database"):
        Ledger(text)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(ConfigError, match="not a ledger"):
        Ledger(other)
    with pytest.raises(ConfigError, match="no file"):
        read_usage(tmp_path / "nowhere")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError):
        Ledger(folder)


def test_usage_on_the_command_line_adds_ledgers_up(tmp_path, capsys):
    paths = [tmp_path / "one.db", tmp_path / "two.db"]

    async def go():
        for path in paths:
            ledger = Ledger(path)
            await ledger.begin(ONE)
            ledger.close()

    asyncio.run(go())
    assert cli.run(["usage", *map(str, paths), "--json", "--by", "key,period"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["data"]
    assert (row["key"], row["period"], row["answers"]) == ("ana", "peak", 2)
    assert row["cost"] == "0.00006048"
    assert cli.run(["usage", str(paths[0])]) == 0
    shown = capsys.readouterr().out
    assert "ana" in shown
    assert "0.00003024 USD" in shown
    assert cli.run(["usage", str(paths[0]), "--since", "2030-01-01"]) == 0
    assert "nothing was used" in capsys.readouterr().err
    assert cli.run(["usage", str(paths[0]), "--by", "colour"]) == 2
    assert "colour" in capsys.readouterr().err
    assert cli.run(["usage", str(paths[0]), "--since", "soon"]) == 2
    assert cli.run(["usage", str(tmp_path / "none.db")]) == 3
