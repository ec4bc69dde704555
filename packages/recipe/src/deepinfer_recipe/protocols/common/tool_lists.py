"""Lists of tools that were sent before: recognised, not checked and printed again.

Agents send the same tools with every turn, and they are a large part of the body. In a body of
bytes the compiled part finds the list, and if its bytes are known, the rest is read with `null`
in its place and the known declarations are put in. A body reads exactly as it would otherwise:
what is cut out is, to the byte, one whole JSON value that was accepted before, so the body is
valid with it if and only if the rest is valid with `null`. Otherwise the list is recognised once
it is read, by the bytes of `marshal` (version 2: no sharing, so equal values give equal bytes;
they are never read back).
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, TypeVar

from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.base.json_text import load_body
from deepinfer_recipe.native import routines as native
from deepinfer_recipe.protocols.common.body import Body, parse_body

MAX_BYTES = 8 * 2**20
"""Of all lists that are remembered; their declarations take a few times as much."""
MAX_LIST_BYTES = 2**20
MIN_LIST_BYTES = 512
"""Shorter ones are read faster than they are looked up."""

B = TypeVar("B", bound=Body)


Key = tuple[type[Body], str, bytes]
"""What a list was parsed as, how its bytes spell it, and its bytes."""


class KnownLists:
    """Remembers parsed lists; those whose last use is longest ago go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lists: OrderedDict[Key, list[Body]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def recall(self, key: Key) -> list[Body] | None:
        """The list that was remembered; nobody may change it."""
        with self._lock:
            known = self._lists.get(key)
            if known is not None:
                self._lists.move_to_end(key)
            return known

    def remember(self, key: Key, tools: list[Body]) -> None:
        """Keep the list, and forget others if together they are too large."""
        size = len(key[2])
        if not MIN_LIST_BYTES <= size <= MAX_LIST_BYTES:
            return
        with self._lock:
            if key not in self._lists:
                self._bytes += size
            self._lists[key] = tools
            while self._bytes > self._max_bytes:
                (_, _, oldest), _ = self._lists.popitem(last=False)
                self._bytes -= len(oldest)


_known = KnownLists()


def parse_request(model: type[B], body: Any) -> tuple[B, Mapping[str, Any]]:
    """Parse a body whose `tools` are a list of frozen models; with it, its decoded fields.

    Raises `RequestParseError`.
    """
    if native is not None and type(body) is bytes:
        place = native.find_list(body, "tools")
        if place is not None and place[1] - place[0] >= MIN_LIST_BYTES:
            return _parse_around(model, body, *place)
    value = load_body(body)
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(tools, list) or not tools:
        return parse_body(model, value), value
    key = (model, "marshal", marshal.dumps(tools, 2))
    return _parse(model, key, value, _known.recall(key))


def _parse_around(model: type[B], body: bytes, start: int, end: int) -> tuple[B, Mapping[str, Any]]:
    """Parse a body whose list of tools lies at `start`."""
    key = (model, "json", body[start:end])
    known = _known.recall(key)
    try:
        rest = body if known is None else body[:start] + b"null" + body[end:]
        value = load_body(rest)
    except RequestParseError:
        # The error must tell of the body as it was sent.
        value = load_body(body)
    return _parse(model, key, value, known)


def _parse(
    model: type[B], key: Key, value: Any, known: list[Body] | None
) -> tuple[B, Mapping[str, Any]]:
    if known is not None:
        return parse_body(model, {**value, "tools": known}), value
    parsed = parse_body(model, value)
    _known.remember(key, parsed.tools)  # type: ignore[attr-defined]
    return parsed, value
