"""From a request model to a JSON answer that is charged once: work, price, replay."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from deepinfer_search_fetch.errors import SearchFetchError
from deepinfer_search_fetch.models import FetchResponse, SearchResponse
from deepinfer_search_fetch.service.idempotency import StoredAnswer, fingerprint
from deepinfer_search_fetch.service.metering import Charge
from deepinfer_search_fetch.service.problems import JSON
from deepinfer_search_fetch.service.state import Call, Service, call_of

_SHORT = 8_000  # characters


def service_of(request: Request) -> Service:
    """The service of the application that got this request."""
    service: Service = request.app.state.service
    return service


async def answer(
    request: Request,
    body: Any,
    work: Callable[[Any], Awaitable[Any]],
    shape: Callable[[Any], dict[str, Any]] | None = None,
) -> Response:
    """Run `work` on a request model and have its result sent and charged.

    shape: another JSON shape of the same result (drop-in routes).
    """
    service, call = service_of(request), call_of(request.scope)

    async def produce() -> StoredAnswer:
        result = await observed(service, work(body))
        due = charge_for(service, call, result)
        if due is None:
            result.usage.billable = False
            result.usage.quantity = 0
        if _is_short(result):  # a thread's turn takes longer than writing it
            text = _written(result, shape)
        else:
            text = await asyncio.to_thread(_written, result, shape)
        return StoredAnswer(text, () if due is None else (due,))

    return await deliver(request, body.model_dump(mode="json"), produce)


async def deliver(
    request: Request, body: Any, produce: Callable[[], Awaitable[StoredAnswer]]
) -> Response:
    """Send what `produce` makes, or what it made before under the same Idempotency-Key.

    body: JSON value that says whether two requests are the same.
    """
    service, call = service_of(request), call_of(request.scope)
    idempotency_key = request.headers.get("idempotency-key")
    if idempotency_key is None:
        return _response(service, call, await produce())
    same = fingerprint(request.method, request.url.path, body)
    async with service.replays.turn(call.key_id, idempotency_key):
        stored = service.replays.find(call.key_id, idempotency_key, same)
        if stored is None:
            service.check_quota(call)
            stored = await produce()
            service.replays.keep(call.key_id, idempotency_key, same, stored)
        else:
            call.headers["Idempotency-Replayed"] = "true"
    return _response(service, call, stored)


def _response(service: Service, call: Call, stored: StoredAnswer) -> Response:
    for charge in stored.charges:
        service.owe(call, charge)
    return Response(stored.text.encode("utf-8", "replace"), media_type=JSON)


async def observed(service: Service, work: Awaitable[Any]) -> Any:
    """The result of a search or fetch, counted in the metrics."""
    try:
        result = await work
    except SearchFetchError as error:
        service.metrics.fetches.labels(error.code).inc()
        raise
    if isinstance(result, SearchResponse):
        service.metrics.searched(result)
    elif isinstance(result, FetchResponse):
        service.metrics.fetches.labels("ok").inc()
        service.metrics.cache.labels("hit" if result.cache.hit else "miss").inc()
    return result


def charge_for(
    service: Service, call: Call, result: SearchResponse | FetchResponse, part: str = ""
) -> Charge | None:
    """What an answer costs: a search with results, a page with content; None for nothing.

    The following pages of a document this key paid for within ten minutes are free, and cache hits
    are where the operator says so. part: tells the answers of one request apart.
    """
    ms = int((time.monotonic() - call.started) * 1000)
    request_id = call.request_id + part
    if isinstance(result, SearchResponse):
        if not result.results:
            return None
        return Charge(request_id, call.key_id, "search", 1, False, 0, ms, "")
    if not result.content.strip() and not result.links and not result.outline:
        return None
    if result.cache.hit and not service.settings.bill_cache_hits:
        return None
    if result.tokens.offset > 0 and service.ledger.was_paid(call.key_id, result.id):
        return None
    size = len(result.content.encode("utf-8", "replace"))
    return Charge(request_id, call.key_id, "fetch", 1, result.cache.hit, size, ms, result.id)


def _is_short(result: Any) -> bool:
    if isinstance(result, FetchResponse):
        lists = (result.links, result.images, result.outline, result.highlights)
        return len(result.content) + sum(300 * len(rows or ()) for rows in lists) < _SHORT
    if isinstance(result, SearchResponse):
        texts = ((r.content, r.summary, r.snippet) for r in result.results)
        return sum(len(text or "") for texts_of in texts for text in texts_of) < _SHORT
    return False


def _written(result: Any, shape: Callable[[Any], dict[str, Any]] | None) -> str:
    return compact(shape(result) if shape else result.model_dump(mode="json", by_alias=True))


def compact(content: Any) -> str:
    """JSON without blanks, characters as they are."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))
