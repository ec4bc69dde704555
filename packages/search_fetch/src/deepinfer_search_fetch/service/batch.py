"""`POST /v1/fetch/batch`: many pages, each success charged once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.models import BatchItem, BatchRequest, BatchResponse
from deepinfer_search_fetch.service.answers import charge_for, compact, deliver, service_of
from deepinfer_search_fetch.service.idempotency import StoredAnswer
from deepinfer_search_fetch.service.metering import Charge
from deepinfer_search_fetch.service.state import Call, Service, call_of

NDJSON = "application/x-ndjson"


async def batch_answer(request: Request, body: BatchRequest) -> Response:
    """Results in input order, or as lines in completion order with `Accept: application/x-ndjson`.

    The same page twice in one batch is charged once. With fail_fast the first failure ends it.
    """
    service, call = service_of(request), call_of(request.scope)
    items = _items(service, call, body)
    if NDJSON in request.headers.get("accept", ""):
        if "idempotency-key" in request.headers:
            raise InvalidRequestError(
                "invalid_argument", "Idempotency-Key cannot be used with application/x-ndjson"
            )
        return StreamingResponse(_lines(service, call, items), media_type=NDJSON)

    async def produce() -> StoredAnswer:
        pairs = sorted([pair async for pair in items], key=lambda pair: pair[0].index)
        results = BatchResponse(results=[item for item, _ in pairs])
        charges = tuple(charge for _, charge in pairs if charge is not None)
        text = await asyncio.to_thread(
            lambda: compact(results.model_dump(mode="json", by_alias=True))
        )
        return StoredAnswer(text, charges)

    return await deliver(request, body.model_dump(mode="json"), produce)


async def _items(
    service: Service, call: Call, body: BatchRequest
) -> AsyncIterator[tuple[BatchItem, Charge | None]]:
    paid: set[str] = set()
    async for item in service.client.fetch_many(body.requests, concurrency=body.concurrency):
        due: Charge | None = None
        if item.response is not None:
            service.metrics.fetches.labels("ok").inc()
            due = charge_for(service, call, item.response, f".{item.index}")
            if due is None or item.response.id in paid:
                due = None
                item.response.usage.billable = False
                item.response.usage.quantity = 0
            else:
                paid.add(item.response.id)
        elif item.error is not None:
            service.metrics.fetches.labels(item.error["code"]).inc()
        yield item, due
        if body.fail_fast and not item.ok:
            break


async def _lines(
    service: Service, call: Call, items: AsyncIterator[tuple[BatchItem, Charge | None]]
) -> AsyncIterator[bytes]:
    async for item, due in items:
        if due is not None:
            service.owe(call, due)
        yield item.model_dump_json(by_alias=True).encode("utf-8", "replace") + b"\n"
