"""Which workers there are: named at start, in a file that is watched, or told by themselves."""

from __future__ import annotations

import asyncio
import logging
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer_engine.errors import ConfigError, TransferError
from deepinfer_engine.pd import transport
from deepinfer_engine.pd.announcing import WORKER_ROLES, Announcement, read_announcement

log = logging.getLogger(__name__)

TTL_S = 10.0
"""A worker that has not said for so long that it is there is gone."""
MEMORY_S = 600.0
LOOK_S = 0.5
MOST = 4096
"""Workers that may announce themselves."""
ROLES = WORKER_ROLES

Members = Mapping[str, tuple[str, ...]]
"""Role -> addresses."""


def read_workers(path: Path) -> Members:
    """The workers of a TOML file: `prefill`, `decode` and `encode`, lists of "host:port".

    Raises ConfigError. An empty file is a fleet without workers.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the workers file {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the workers file {path} is not TOML: {error}") from None
    unknown = sorted(set(values) - set(ROLES))
    if unknown:
        raise ConfigError(f"{path}: {unknown[0]!r} is none of {', '.join(ROLES)}")
    for role, addresses in values.items():
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ConfigError(f'{path}: {role} is a list of "host:port"')
        for address in addresses:
            transport.parse_address(address)
    return {role: tuple(dict.fromkeys(values.get(role, ()))) for role in ROLES}


@dataclass(slots=True)
class _Told:
    said: Announcement
    at: float
    refused: bool = False


class Announced:
    """Workers that told of themselves within the last ten seconds and are not leaving."""

    def __init__(self, cluster_key: bytes, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = cluster_key
        self._clock = clock
        self._told: dict[tuple[str, str], _Told] = {}

    def hear(self, body: bytes, signed: str) -> Announcement:
        """Take the words of a worker. Raises TransferError where they are not to be believed."""
        said = read_announcement(self._key, body, signed)
        key = said.role, said.address
        before = self._told.get(key)
        if before is not None and (said.epoch, said.number) <= (
            before.said.epoch,
            before.said.number,
        ):
            raise TransferError(f"an announcement of {said.address} came late or twice")
        if before is None and len(self._told) >= MOST:
            raise TransferError(f"{MOST} workers are announced, which is the limit")
        self._told[key] = _Told(said, self._clock())
        return said

    def refused(self, role: str, address: str) -> None:
        """Nothing listens there: the worker is gone until it says otherwise."""
        told = self._told.get((role, address))
        if told is not None:
            told.refused = True

    def members(self) -> Members:
        now = self._clock()
        # What was last said is remembered a while longer, or it could be said again.
        self._told = {key: told for key, told in self._told.items() if now - told.at <= MEMORY_S}
        here = [
            key
            for key, told in self._told.items()
            if now - told.at <= TTL_S and not told.said.leaving and not told.refused
        ]
        return {role: tuple(sorted(a for r, a in here if r == role)) for role in ROLES}


class Directory:
    """All sources together; what is named at start stays whatever the others say."""

    def __init__(
        self,
        static: Mapping[str, Sequence[str]],
        *,
        file: Path | None = None,
        announced: Announced | None = None,
    ) -> None:
        """Raises ConfigError for a file that cannot be used; later a bad file changes nothing."""
        self._static = static
        self._file = file
        self.announced = announced
        self._seen = None if file is None else _mark(file)
        self._named: Members = {} if file is None else read_workers(file)
        self._changed = asyncio.Event()

    def members(self) -> Members:
        """Who is there now."""
        self._read_again()
        told: Members = {} if self.announced is None else self.announced.members()
        sources = (self._static, self._named, told)
        return {
            role: tuple(dict.fromkeys(a for source in sources for a in source.get(role, ())))
            for role in ROLES
        }

    def hear(self, body: bytes, signed: str) -> Announcement:
        """See `Announced.hear`."""
        if self.announced is None:
            raise TransferError(
                "this router takes no announcements: start it with --accept-workers"
            )
        said = self.announced.hear(body, signed)
        self._changed.set()
        return said

    def refused(self, role: str, address: str) -> None:
        """See `Announced.refused`."""
        if self.announced is not None:
            self.announced.refused(role, address)

    async def run(self, apply: Callable[[Members], None], look_s: float = LOOK_S) -> None:
        """Call `apply` whenever the members are other ones, until cancelled."""
        last: Members | None = None
        while True:
            self._changed.clear()
            now = self.members()
            if now != last:
                apply(now)
                last = now
            try:
                async with asyncio.timeout(look_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _read_again(self) -> None:
        if self._file is None:
            return
        mark = _mark(self._file)
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._named = read_workers(self._file)
        except ConfigError as error:
            log.warning("%s; the workers named before are kept", error)


def _mark(path: Path) -> tuple[int, int, int] | None:
    """Another one when a file was written or replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
