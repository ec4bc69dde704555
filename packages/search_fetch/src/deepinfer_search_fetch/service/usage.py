"""`GET /v1/usage`: sums of the ledger for whoever asks."""

from __future__ import annotations

import time
from typing import Any

from pydantic import BaseModel

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.service.metering import GROUPS, GroupBy, Ledger
from deepinfer_search_fetch.service.settings import parse_moment

_GROUP_OF: dict[str, GroupBy] = {group: group for group in GROUPS}


class UsageRow(BaseModel):
    """One sum. Only the columns asked for with group_by are there, besides the currency."""

    key_id: str | None = None
    endpoint: str | None = None
    day: str | None = None
    month: str | None = None
    currency: str
    rows: int
    quantity: int
    price_micros: int
    cache_hits: int
    bytes: int


class UsageReport(BaseModel):
    """Sums of the billable calls in from <= time < to, in millionths of the currency unit."""

    since: str
    until: str
    group_by: list[str]
    usage: list[UsageRow]
    totals: list[UsageRow]


def report(
    ledger: Ledger, key_id: str | None, since: str | None, until: str | None, group_by: str
) -> dict[str, Any]:
    """The report as JSON values. key_id: None for every key.

    Raises InvalidRequestError naming the parameter.
    """
    start, end = _moment("from", since, 0.0), _moment("to", until, time.time() + 1)
    groups: list[GroupBy] = []
    for word in filter(None, (w.strip() for w in group_by.split(","))):
        known = _GROUP_OF.get(word)
        if known is None:
            raise InvalidRequestError(
                "invalid_argument", f"group_by: {word!r} is not one of {', '.join(GROUPS)}"
            )
        if known not in groups:
            groups.append(known)
    return {
        "since": _spelled(start),
        "until": _spelled(end),
        "group_by": groups,
        "usage": ledger.usage(key_id, start, end, groups),
        "totals": ledger.usage(key_id, start, end, ()),
    }


def _moment(name: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        # Rows begin in 1970; earlier moments have no spelling as seconds.
        return max(0.0, parse_moment(text).timestamp())
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidRequestError(
            "invalid_argument", f"{name}: {text[:40]!r} is not an RFC 3339 date or time: {error}"
        ) from None


def _spelled(timestamp: float) -> str:
    moment = parse_moment(f"{timestamp:.6f}")
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
