"""Who goes first: classes of priority, then users in equal shares, then deadlines, then arrival.

Shares are counted in tokens of virtual time, as in start-time fair queueing: a user's account grows
with what its requests cost, and who has the smallest account goes first. Who comes back after a
pause starts at the account of the one served last, so that silence saves nothing up. Users of one
key share what the key gets: more user names bring no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MOST_NAMES = 4096
"""Accounts that are kept of those who are not there; of more the smallest are forgotten."""

Rank = tuple[int, bool, float, float, float, int]


class Claim(Protocol):
    """Somebody who wants a place."""

    @property
    def salt(self) -> str: ...

    @property
    def priority(self) -> int: ...

    @property
    def arrival(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def order(self) -> int: ...

    @property
    def preemptions(self) -> int: ...


@dataclass(slots=True)
class Accounts:
    """Tokens by name, since the time at which the least served of those present stood."""

    spent: dict[str, float] = field(default_factory=dict[str, float])
    present: dict[str, int] = field(default_factory=dict[str, int])
    """Requests of each name that wait or run."""
    clock: float = 0.0
    """Account of the last who was let in: where newcomers start."""

    def enter(self, name: str) -> None:
        if not self.present.get(name):
            self.present[name] = 0
            self.spent[name] = max(self.spent.get(name, 0.0), self.clock)
        self.present[name] += 1

    def leave(self, name: str) -> None:
        self.present[name] -= 1
        if not self.present[name]:
            del self.present[name]
            if self.spent[name] <= self.clock:
                del self.spent[name]
        if not self.present:
            self.spent.clear()
            self.clock = 0.0
        elif len(self.spent) > MOST_NAMES + len(self.present):
            gone = sorted(
                (tokens, name) for name, tokens in self.spent.items() if name not in self.present
            )
            for _, name in gone[: len(gone) // 2]:
                del self.spent[name]

    def charge(self, name: str, tokens: int) -> None:
        if name in self.spent:
            self.spent[name] += tokens


def key_of(salt: str) -> str:
    """The API key's part of a cache salt, which is `key` or `key/user`."""
    return salt.partition("/")[0]


@dataclass(slots=True)
class FairOrder:
    """The order of requests that wait, and of those whose memory others may get."""

    age_s: float
    """A request that waits gains one class each so many seconds; 0 = never."""
    keys: Accounts = field(default_factory=Accounts)
    users: Accounts = field(default_factory=Accounts)

    def enter(self, claim: Claim) -> None:
        self.keys.enter(key_of(claim.salt))
        self.users.enter(claim.salt)

    def leave(self, claim: Claim) -> None:
        self.keys.leave(key_of(claim.salt))
        self.users.leave(claim.salt)

    def admitted(self, claim: Claim) -> None:
        """Its turn has come: newcomers start where its user stands."""
        key, user = key_of(claim.salt), claim.salt
        self.keys.clock = max(self.keys.clock, self.keys.spent[key])
        self.users.clock = max(self.users.clock, self.users.spent[user])

    def charge(self, salt: str, tokens: int) -> None:
        """Tokens that are computed for a user."""
        self.keys.charge(key_of(salt), tokens)
        self.users.charge(salt, tokens)

    def level(self, claim: Claim, now: float) -> int:
        """Its class: the priority it came with, and what it has gained by waiting. Less is
        sooner."""
        aged = int((now - claim.arrival) / self.age_s) if self.age_s > 0 else 0
        return claim.priority - max(aged, 0)

    def rank(self, claim: Claim, now: float) -> Rank:
        """Sort key of waiting requests. Who was preempted goes before its class."""
        return (
            self.level(claim, now),
            not claim.preemptions,
            self.keys.spent[key_of(claim.salt)],
            self.users.spent[claim.salt],
            claim.deadline,
            claim.order,
        )
