"""A location service that the machines keep among themselves: each key belongs to one member.

Rendezvous hashing over the member list decides which, so that a member that comes or goes moves
only its own share. There is no consensus: members that disagree about the list, or lose their
share, cost hits and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from deepinfer_kvtier.base.config import split_address
from deepinfer_kvtier.remote.state_exchange import wire
from deepinfer_kvtier.remote.state_exchange.client import PeerClient
from deepinfer_kvtier.remote.state_exchange.locations import LocalLocations
from deepinfer_kvtier.remote.state_exchange.wire import WindowRecord

_PUBLISH_TIMEOUT_S = 0.5
_RECORDS_PER_FRAME = wire.MAX_BODY_BYTES // wire.RECORD_BYTES


def owner(key: bytes, members: Sequence[str]) -> str:
    """The member a key belongs to: the highest hash of member and key."""
    return max(members, key=lambda member: xxhash.xxh3_64_intdigest(member.encode() + b"\0" + key))


class PeerLocations:
    """Own share in memory, the others' over TCP; lookups ask all owners at the same time."""

    def __init__(
        self, client: PeerClient, own: LocalLocations, *, address: Callable[[], str]
    ) -> None:
        self._client = client
        self._own = own
        self._address = address
        self._lock = threading.Lock()
        self._members: tuple[str, ...] = ()
        self._threads: ThreadPoolExecutor | None = None

    def set_members(self, members: Sequence[str]) -> None:
        """Replace the member list: addresses of all machines, the same on each."""
        for member in members:
            split_address(member)
        with self._lock:
            gone = set(self._members) - set(members)
            self._members = tuple(sorted(set(members)))
        self._client.forget(gone)

    def publish(self, records: Sequence[WindowRecord]) -> None:
        items = {record.key: record.pack() for record in records}
        mine, failed = self._send(wire.PUBLISH, items)
        self._own.publish([record for record in records if record.key in mine])
        if failed is not None:
            raise failed

    def withdraw(self, keys: Sequence[bytes], machine: bytes) -> None:
        mine, failed = self._send(wire.WITHDRAW, {key: key + machine for key in keys})
        self._own.withdraw([key for key in keys if key in mine], machine)
        if failed is not None:
            raise failed

    def lookup(self, keys: Sequence[bytes], timeout_s: float) -> list[WindowRecord | None]:
        found: list[WindowRecord | None] = [None] * len(keys)
        shares = self._by_owner(keys)
        mine = shares.pop(self._address(), [])
        for i, record in zip(mine, self._own.lookup([keys[i] for i in mine]), strict=True):
            found[i] = record
        asked = [
            (member, share) for member, share in shares.items() if self._client.health.alive(member)
        ]
        if not asked:
            return found

        def ask(member: str, share: list[int]) -> None:
            body = b"".join(keys[i] for i in share)
            try:
                answer = self._client.call(member, wire.LOOKUP, body, timeout_s)
                for i, data in zip(
                    share, wire.split_records(answer, wire.RECORD_BYTES), strict=True
                ):
                    if any(data):
                        found[i] = WindowRecord.unpack(data)
            except (OSError, ValueError):
                self._client.counts["lookup_errors"] += 1

        first, *others = asked
        waiting = [self._pool().submit(ask, member, share) for member, share in others]
        ask(*first)
        for future in waiting:
            future.result()
        return found

    def _send(self, kind: int, items: Mapping[bytes, bytes]) -> tuple[set[bytes], OSError | None]:
        """Tell each owner its share; a member that cannot be told costs its share and no other's.

        returns: the keys that are this machine's own, and the last failure.
        """
        keys = list(items)
        mine: set[bytes] = set()
        failed: OSError | None = None
        for member, share in self._by_owner(keys).items():
            if member == self._address():
                mine.update(keys[i] for i in share)
                continue
            try:
                for at in range(0, len(share), _RECORDS_PER_FRAME):
                    body = b"".join(items[keys[i]] for i in share[at : at + _RECORDS_PER_FRAME])
                    self._client.call(member, kind, body, _PUBLISH_TIMEOUT_S)
            except OSError as error:
                failed = error
        return mine, failed

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    def _by_owner(self, keys: Sequence[bytes]) -> dict[str, list[int]]:
        members = self._members
        shares: dict[str, list[int]] = {}
        if members:
            for i, key in enumerate(keys):
                shares.setdefault(owner(key, members), []).append(i)
        return shares

    def _pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(8, thread_name_prefix="kvtier-peers")
            return self._threads
