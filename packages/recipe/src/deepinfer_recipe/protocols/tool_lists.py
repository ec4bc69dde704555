"""Lists of tools that were sent before: recognised by their bytes, not read and checked again.

Agents send the same tools with every turn, and they are a large part of the body. The list is
found in the body's bytes; if it is known, the rest is read with `null` in its place and the
known declarations are put in. A body reads exactly as it would otherwise: what is cut out is, to
the byte, one whole JSON value that was accepted before, so the body is valid with it if and only
if the rest is valid with `null`.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any, TypeVar

from deepinfer_recipe.errors import RequestParseError
from deepinfer_recipe.json_text import load_body
from deepinfer_recipe.native import routines as native
from deepinfer_recipe.protocols.body import Body, parse_body

MAX_BYTES = 8 * 2**20
"""Of all lists that are remembered; their declarations take a few times as much."""
MAX_LIST_BYTES = 2**20
MIN_LIST_BYTES = 512
"""Shorter ones are read faster than they are looked up."""

B = TypeVar("B", bound=Body)


class KnownLists:
    """Remembers lists by what they were parsed as and their bytes; the oldest use goes first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lists: OrderedDict[tuple[type[Body], bytes], list[Body]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def recall(self, model: type[Body], raw: bytes) -> list[Body] | None:
        """The list that was remembered for these bytes; nobody may change it."""
        with self._lock:
            known = self._lists.get((model, raw))
            if known is not None:
                self._lists.move_to_end((model, raw))
            return known

    def remember(self, model: type[Body], raw: bytes, tools: list[Body]) -> None:
        """Keep the list, and forget others if together they are too large."""
        with self._lock:
            if (model, raw) not in self._lists:
                self._bytes += len(raw)
            self._lists[model, raw] = tools
            while self._bytes > self._max_bytes:
                (_, oldest), _ = self._lists.popitem(last=False)
                self._bytes -= len(oldest)


_known = KnownLists()


def parse_request(model: type[B], body: Any) -> B:
    """Parse a body whose `tools` are a list of frozen models. Raises `RequestParseError`."""
    place = None
    if native is not None and type(body) is bytes:
        place = native.find_list(body, "tools")
    if place is None or not MIN_LIST_BYTES <= place[1] - place[0] <= MAX_LIST_BYTES:
        return parse_body(model, load_body(body))
    raw = body[place[0] : place[1]]
    known = _known.recall(model, raw)
    if known is not None:
        try:
            rest = load_body(body[: place[0]] + b"null" + body[place[1] :])
        except RequestParseError:
            # The error must tell of the body as it was sent.
            rest = load_body(body)
        return parse_body(model, {**rest, "tools": known})
    parsed = parse_body(model, load_body(body))
    _known.remember(model, raw, parsed.tools)  # type: ignore[attr-defined]
    return parsed
