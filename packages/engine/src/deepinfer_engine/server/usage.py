"""`GET /v1/usage`: sums of the ledger, for the key that asks or, with the admin key, for all."""

from __future__ import annotations

import asyncio
import datetime as dt
from functools import partial
from typing import Any, get_args

from fastapi import APIRouter, Request

from deepinfer_engine.codec.errors import InvalidRequest, NotFound
from deepinfer_engine.server.ledger import GROUPS, GroupBy, read_usage
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["usage"])
_ALL_TIME = (0.0, 1e18)


@router.get("/v1/usage")
async def usage(
    request: Request, since: str | None = None, until: str | None = None, by: str = "key"
) -> dict[str, Any]:
    """Answers, tokens and cost with since <= arrival < until (ISO dates or times, UTC where they
    name no zone), grouped `by` key, model, protocol, period, day or month, commas between them."""
    services = services_of(request)
    key: str | None = None
    if not services.admin.admits(request.headers):
        key = services.keys.identify(request.headers).key_id or ""
    ledger = None if services.billing is None else services.billing.ledger
    if ledger is None:
        raise NotFound("this server keeps no ledger; its operator starts it with --ledger FILE")
    try:
        groups = parse_groups(by)
        span = parse_span(since, until)
    except ValueError as exc:
        raise InvalidRequest(str(exc)) from exc
    await ledger.settled()
    read = partial(read_usage, ledger.path, key=key, since=span[0], until=span[1], by=groups)
    rows = await asyncio.to_thread(read)
    return {"object": "usage", "by": list(groups), "data": [row.shown() for row in rows]}


def parse_groups(text: str) -> tuple[GroupBy, ...]:
    """`key,day` as columns; ValueError names what is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in get_args(GroupBy)]
    if unknown or len(set(names)) != len(names):
        raise ValueError(f"by: wanted some of {', '.join(GROUPS)}, each once, got {text[:60]!r}")
    return tuple(name for name in GROUPS if name in names)


def parse_span(since: str | None, until: str | None) -> tuple[float, float]:
    """Both ends in seconds since 1970; ValueError names the one that is no date."""
    begin = _ALL_TIME[0] if since is None else _moment("since", since)
    end = _ALL_TIME[1] if until is None else _moment("until", until)
    return begin, end


def _moment(name: str, text: str) -> float:
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{name}: wanted a date or time as 2026-11-30 or 2026-11-30T12:00Z, got {text[:40]!r}"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
