"""robots.txt by RFC 9309: grouping, longest match, `*` and `$`, and what a missing file means."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.models import RobotsInfo
from deepinfer_search_fetch.urls import Url

PRODUCT_TOKEN = "DeepInferFetch"
MAX_BYTES = 500 * 1024
TTL_SECONDS = 24 * 3600
RETRY_SECONDS = 600
MAX_HOSTS = 4096
_DIRECTIVES_WITH_VALUES = frozenset(
    {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one group: (allow, pattern) pairs, and the crawl delay in seconds."""

    rules: tuple[tuple[bool, str], ...] = ()
    crawl_delay: float | None = None

    def allows(self, target: str) -> bool:
        """True if `target` (path and query) may be fetched: the longest pattern decides."""
        if target.partition("?")[0] == "/robots.txt":
            return True
        best_length, best_allow = -1, True
        for allow, pattern in self.rules:
            wins = len(pattern) > best_length or (len(pattern) == best_length and allow)
            if wins and _matches(pattern, target):
                best_length, best_allow = len(pattern), allow
        return best_allow


ALLOW_ALL = Rules()
DENY_ALL = Rules(((False, "/"),))


def parse_robots(text: str, product_token: str = PRODUCT_TOKEN) -> Rules:
    """The rules that hold for `product_token`: its own groups merged, else those of `*`."""
    token = product_token.lower()
    groups: dict[str, list[tuple[bool, str]]] = {}
    delays: dict[str, float] = {}
    agents: list[str] = []
    agents_open = False
    for line in text.splitlines():
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip().lower(), value.strip()
        if not colon:
            continue
        if key == "user-agent":
            agent = re.match(r"[A-Za-z_-]+|\*", value)
            agents = [*(agents if agents_open else []), agent.group().lower() if agent else ""]
            agents_open = True
            groups.setdefault(agents[-1], [])
            continue
        if key in ("allow", "disallow"):
            for agent in agents if value else ():
                groups[agent].append((key == "allow", _normalise(value)))
            agents_open = False
        elif key == "crawl-delay" and re.fullmatch(r"\d{1,5}(\.\d+)?", value):
            delays.update(dict.fromkeys(agents, float(value)))
            agents_open = False
    name = token if token in groups else "*"
    return Rules(tuple(groups.get(name, ())), delays.get(name))


def read_robots(body: bytes) -> Rules:
    """The rules of a robots.txt file for this program."""
    return parse_robots(body[:MAX_BYTES].decode("utf-8-sig", errors="replace"))


def _matches(pattern: str, target: str) -> bool:
    """Greedy wildcard match without a regular expression, so no pattern can make it slow."""
    anchored = pattern.endswith("$")
    parts = (pattern[:-1] if anchored else pattern).split("*")
    target = _normalise(target)
    if not target.startswith(parts[0]):
        return False
    position = len(parts[0])
    for part in parts[1:-1]:
        found = target.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    if len(parts) == 1:
        return not anchored or position == len(target)
    last = parts[-1]
    if anchored:
        return target.endswith(last) and len(target) - len(last) >= position
    return target.find(last, position) >= 0


def _normalise(path: str) -> str:
    """Same octets, same spelling: decode and re-encode, keeping reserved characters encoded."""
    pieces = re.split(r"(%2[fF]|%3[fF]|%23|%2[aA]|%24)", path)
    return "".join(
        p.upper() if i % 2 else quote(unquote_to_bytes(p), safe="/:@!$&'()*+,;=-._~?[]%")
        for i, p in enumerate(pieces)
    )


def robots_directives(
    headers: Iterable[tuple[str, str]], product_token: str = PRODUCT_TOKEN
) -> frozenset[str]:
    """The X-Robots-Tag directives that concern us, lower-case; "none" also means noindex.

    A header may begin with the name of the one agent it is meant for ("otherbot: noindex").
    """
    found: set[str] = set()
    for name, value in headers:
        if name != "x-robots-tag":
            continue
        agent, colon, rest = value.partition(":")
        named = bool(colon) and agent.strip().lower() not in _DIRECTIVES_WITH_VALUES
        if named and agent.strip().lower() != product_token.lower():
            continue
        found.update(part.strip().lower() for part in (rest if named else value).split(","))
    return frozenset(found | {"noindex"} if "none" in found else found)


class OriginError(Exception):
    """No connection to the origin of a robots.txt: the `error` of any request to it."""

    def __init__(self, error: SearchFetchError) -> None:
        super().__init__(error.message)
        self.error = error


class RobotsCache:
    """Fetches and remembers robots.txt per origin.

    `get(url)` returns (status, body) after at most five redirects and raises SearchFetchError when
    the file cannot be reached, which RFC 9309 reads as "disallowed", or OriginError when the page
    cannot be reached either; `check` raises its error, and remembers nothing.
    """

    def __init__(
        self,
        get: Callable[[Url], Awaitable[tuple[int, bytes]]],
        parse: Callable[[bytes], Awaitable[Rules]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._get = get
        self._parse = parse
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Rules, bool]] = OrderedDict()

    async def check(self, url: Url) -> tuple[RobotsInfo, Rules]:
        """Whether `url` may be fetched, and the rules that say so."""
        cached = self._known.get(url.origin)
        if cached and self._clock() < cached[0]:
            rules, present = cached[1], cached[2]
            source = "cache"
        else:
            rules, present, ttl = await self._load(url)
            self._known[url.origin] = (self._clock() + ttl, rules, present)
            self._known.move_to_end(url.origin)
            if len(self._known) > MAX_HOSTS:
                self._known.popitem(last=False)
            source = "fetched"
        return (
            RobotsInfo(allowed=rules.allows(url.target), source=source if present else "absent"),
            rules,
        )

    async def _load(self, url: Url) -> tuple[Rules, bool, float]:
        robots_url = Url(url.scheme, url.host, url.host_kind, url.port, "/robots.txt")
        try:
            status, body = await self._get(robots_url)
        except OriginError as failure:
            # The page itself is out of reach: that is the answer, not a rule nobody wrote.
            raise failure.error from None
        except SearchFetchError:
            return DENY_ALL, True, RETRY_SECONDS
        if 200 <= status < 300:
            return await self._parse(body), True, TTL_SECONDS
        if 400 <= status < 500:
            return ALLOW_ALL, False, TTL_SECONDS
        return DENY_ALL, True, RETRY_SECONDS
