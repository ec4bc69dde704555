"""Who used what, and what it cost: one row for every answer that went out whole, in an SQLite file.

An answer is settled in three steps. `begin` commits its row, as on its way, when all but the end of
the answer is out; the end goes out; `finish` marks the row as sent. Whatever is killed at whatever
moment, every answer that a client has whole has its row, and no row is there twice. A row that was
on its way when its server died is told apart from then on (`unsettled`) and costs nothing: whether
the end of that answer arrived, nobody knows.

A commit is on the disk before `begin` returns. Answers that end together share one commit.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.errors import ConfigError, EngineUnavailable
from deepinfer_engine.server.prices import spelled

log = logging.getLogger(__name__)

FORMAT = 1
GroupBy = Literal["key", "model", "protocol", "period", "day", "month"]
GROUPS: tuple[GroupBy, ...] = ("key", "model", "protocol", "period", "day", "month")

_ON_ITS_WAY, _SENT, _UNSETTLED = 0, 1, 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    id TEXT PRIMARY KEY, at REAL NOT NULL, key TEXT NOT NULL, protocol TEXT NOT NULL,
    model TEXT NOT NULL, finish TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, priced_as TEXT NOT NULL,
    period TEXT NOT NULL, currency TEXT NOT NULL, hit_picos INTEGER NOT NULL,
    miss_picos INTEGER NOT NULL, output_picos INTEGER NOT NULL, cost_picos INTEGER NOT NULL,
    state INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS answers_at ON answers (at);
CREATE INDEX IF NOT EXISTS answers_key_at ON answers (key, at);
CREATE INDEX IF NOT EXISTS answers_open ON answers (id) WHERE state = 0;
"""
_COLUMNS: dict[str, str] = {
    "key": "key",
    "model": "model",
    "protocol": "protocol",
    "period": "period",
    "day": "strftime('%Y-%m-%d', at, 'unixepoch')",
    "month": "strftime('%Y-%m', at, 'unixepoch')",
}
_GRAINS = 10**9
"""Sums are taken in two parts: one of a great many picos would not fit SQLite's 64 bits."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One answer. `at`: its arrival, seconds since 1970. Tokens as its usage told them to the
    client; picos for one token and of the whole, see `prices`. `key`: the API key's id, empty on
    an open server."""

    id: str
    at: float
    key: str
    protocol: str
    model: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    priced_as: str = ""
    period: str = ""
    currency: str = ""
    hit_picos: int = 0
    miss_picos: int = 0
    output_picos: int = 0
    cost_picos: int = 0


_INSERT = (
    f"INSERT INTO answers ({', '.join(f.name for f in fields(Charge))}, state) VALUES "  # nosec B608
    f"({', '.join(':' + f.name for f in fields(Charge))}, {_ON_ITS_WAY})"
)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Sums over the answers of one group. `unsettled` of them are on top, and cost nothing."""

    group: dict[str, str]
    currency: str
    answers: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_picos: int
    unsettled: int

    def shown(self) -> dict[str, Any]:
        """As JSON tells it."""
        return {
            **self.group,
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "cost": spelled(self.cost_picos),
            "currency": self.currency,
            "unsettled": self.unsettled,
        }


_Work = tuple[str, dict[str, Any]]


class Ledger:
    """The one writer of a file. Methods that wait belong to one event loop."""

    def __init__(self, path: Path) -> None:
        """Create or open the file; what an earlier server left on its way becomes `unsettled`.

        Raises ConfigError: the file is no ledger, of another format, or another server writes it.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"ledger: cannot create {path}: {exc.strerror}") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not path.exists():
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
            self._db = _opened(path, writes=True)
            with self._db:
                self._db.execute(
                    f"UPDATE answers SET state = {_UNSETTLED} WHERE state = {_ON_ITS_WAY}"  # nosec B608
                )
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"ledger: another server writes {path}; give each its own, `deepinfer usage` adds "
                "them up"
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._pending: list[tuple[Sequence[_Work], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.failures = 0
        """Commits that failed; the answers they were of were refused."""

    async def begin(self, charge: Charge) -> None:
        """Return when the row is on the disk. Raises EngineUnavailable: the answer must not end."""
        try:
            await self._commit((_INSERT, asdict(charge)))
        except sqlite3.Error as exc:
            self.failures += 1
            log.exception("the ledger %s cannot be written", self.path)
            raise EngineUnavailable("what this answer uses cannot be recorded") from exc

    def finish(self, answer_id: str) -> None:
        """The end of the answer is out: its row stands. Written soon, not waited for."""
        self._soon(f"UPDATE answers SET state = {_SENT} WHERE id = :id", answer_id)  # nosec B608

    def void(self, answer_id: str) -> None:
        """The end of the answer did not go out: no row."""
        self._soon("DELETE FROM answers WHERE id = :id", answer_id)

    async def settled(self) -> None:
        """Return when all that was begun, finished or voided before is written."""
        while self._writing is not None and not self._writing.done():
            await asyncio.shield(self._writing)

    def close(self) -> None:
        """Write what is left, and let go of the file."""
        if self._writing is not None:
            self._writing.cancel()
        left = [work for works, future in self._pending if not future.done() for work in works]
        self._pending = []
        self._thread.submit(self._closing, left).result()
        self._thread.shutdown()
        os.close(self._lock)

    def _closing(self, left: Sequence[_Work]) -> None:
        try:
            if left:
                self._write(left)
        except sqlite3.Error:
            log.exception("the ledger %s could not be closed in order", self.path)
        finally:
            self._db.close()

    def _soon(self, statement: str, answer_id: str) -> None:
        future = self._commit((statement, {"id": answer_id}))
        future.add_done_callback(self._told)

    def _told(self, future: asyncio.Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self.failures += 1
            log.error("the ledger %s cannot be written: %s", self.path, error)

    def _commit(self, *works: _Work) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._pending.append((works, future))
        if self._writing is None or self._writing.done():
            self._writing = loop.create_task(self._write_all())
        return future

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._pending:
            batch, self._pending = self._pending, []
            works = [work for works, _ in batch for work in works]
            error: BaseException | None = None
            try:
                await loop.run_in_executor(self._thread, self._write, works)
            except sqlite3.Error as exc:
                error = exc
            for _, future in batch:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)

    def _write(self, works: Sequence[_Work]) -> None:
        with self._db:
            for statement, values in works:
                self._db.execute(statement, values)


def _opened(path: Path, *, writes: bool) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'rw' if writes else 'ro'}"
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(uri, uri=True, timeout=10, check_same_thread=False)
        _check(path, db, empty_is_fine=writes)
        if writes:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a commit survives a power cut, too
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {FORMAT}")
    except BaseException as exc:
        if db is not None:
            db.close()
        if isinstance(exc, sqlite3.Error):
            raise ConfigError(f"ledger: {path} cannot be used: {exc}") from exc
        raise
    return db


def _check(path: Path, db: sqlite3.Connection, *, empty_is_fine: bool) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if not tables and version == 0:
        if not empty_is_fine:
            raise ConfigError(f"ledger: {path} is empty: no server has written it yet")
    elif version != FORMAT or "answers" not in tables:
        raise ConfigError(
            f"ledger: {path} is not a ledger of format {FORMAT}; name another file, or move this "
            "one away"
        )


def read_usage(
    path: Path,
    *,
    key: str | None = None,
    since: float = 0.0,
    until: float = 1e18,
    by: Sequence[GroupBy] = ("key",),
) -> list[UsageRow]:
    """Sums over answers with since <= at < until, beside a server that writes or without one.

    key: of this one alone. Money of different currencies is never added. Answers on their way
    count; of a server that is dead they are unsettled from its next start on. Raises ConfigError.
    """
    if not path.is_file():
        raise ConfigError(f"ledger: there is no file {path}")
    names = [*by, "currency"]
    columns = ", ".join([*(_COLUMNS[name] for name in by), "currency"])
    counts = f"state != {_UNSETTLED}"
    sums = ", ".join(
        f"coalesce(sum(({value}) * ({counts})), 0)"
        for value in (
            "1", "prompt_tokens", "cached_tokens", "output_tokens",
            f"cost_picos / {_GRAINS}", f"cost_picos % {_GRAINS}",
        )
    )  # fmt: skip
    places = ", ".join(str(i + 1) for i in range(len(names)))
    statement = (
        f"SELECT {columns}, {sums}, sum(NOT ({counts})) FROM answers "  # nosec B608
        "WHERE at >= :since AND at < :until AND (:key IS NULL OR key = :key) "
        f"GROUP BY {places} ORDER BY {places}"
    )
    with closing(_opened(path, writes=False)) as db:
        found = db.execute(statement, {"since": since, "until": until, "key": key}).fetchall()
    rows: list[UsageRow] = []
    for row in found:
        groups, (answers, prompt, cached, output, grains, rest, lost) = (
            row[: len(names)],
            row[len(names) :],
        )
        rows.append(
            UsageRow(
                group={name: str(value) for name, value in zip(by, groups, strict=False)},
                currency=str(groups[-1]),
                answers=answers,
                prompt_tokens=prompt,
                cached_tokens=cached,
                output_tokens=output,
                cost_picos=grains * _GRAINS + rest,
                unsettled=lost,
            )
        )
    return rows


def add_up(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Rows of several ledgers: those of one group and currency become one."""
    sums: dict[tuple[str, ...], UsageRow] = {}
    for row in rows:
        place = (*row.group.values(), row.currency)
        known = sums.get(place)
        sums[place] = row if known is None else _added(known, row)
    return [sums[place] for place in sorted(sums)]


def _added(a: UsageRow, b: UsageRow) -> UsageRow:
    return UsageRow(
        a.group,
        a.currency,
        a.answers + b.answers,
        a.prompt_tokens + b.prompt_tokens,
        a.cached_tokens + b.cached_tokens,
        a.output_tokens + b.output_tokens,
        a.cost_picos + b.cost_picos,
        a.unsettled + b.unsettled,
    )
