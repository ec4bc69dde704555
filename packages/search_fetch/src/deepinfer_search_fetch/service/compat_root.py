"""Drop-in routes at the root, `/search` and `/extract`, in the shape that agent frameworks know.

What this service does not have (a written answer, pictures of a search) is null or empty there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.models import (
    BatchItem,
    Domain,
    FetchRequest,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.service.answers import (
    answer,
    charge_for,
    compact,
    deliver,
    service_of,
)
from deepinfer_search_fetch.service.auth import ApiKey
from deepinfer_search_fetch.service.idempotency import StoredAnswer
from deepinfer_search_fetch.service.metering import Charge
from deepinfer_search_fetch.service.state import call_of

MAX_URLS = 20
_PERIODS = {"d": "day", "w": "week", "m": "month", "y": "year"}
_TOKENS_A_PAGE = 16_000


def _day(value: str | None) -> str | None:
    if value is not None:
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value):
            raise ValueError(f"{value[:40]!r} is not a day such as 2026-11-30")
        date.fromisoformat(value)
    return value


Day = Annotated[str | None, AfterValidator(_day)]


class RootSearchRequest(BaseModel):
    """Fields that change nothing here (search_depth, topic, include_answer, …) are accepted."""

    model_config = ConfigDict(extra="ignore")

    query: str = Field(min_length=1, max_length=512)
    max_results: int = Field(default=5, ge=0, le=20)
    time_range: Literal["day", "week", "month", "year", "d", "w", "m", "y"] | None = None
    start_date: Day = None
    end_date: Day = None
    days: int | None = Field(default=None, ge=1)
    include_domains: list[Domain] = Field(default_factory=list, max_length=100)
    exclude_domains: list[Domain] = Field(default_factory=list, max_length=100)
    include_raw_content: bool | Literal["markdown", "text"] = False
    include_favicon: bool = False

    def wanted(self) -> SearchRequest:
        """The request in our own terms. Raises InvalidRequestError for an impossible period."""
        freshness = None
        if self.start_date or self.end_date:
            freshness = f"{self.start_date or '1995-01-01'}..{self.end_date or '2999-12-31'}"
        elif self.time_range is not None:
            freshness = _PERIODS.get(self.time_range, self.time_range)
        return SearchRequest(
            query=self.query,
            count=max(self.max_results, 1),
            include_domains=self.include_domains,
            exclude_domains=self.exclude_domains,
            freshness=freshness,
            content="full" if self.include_raw_content else "summary",
            max_tokens=200_000 if self.include_raw_content else 8_000,
            max_tokens_per_result=_TOKENS_A_PAGE,
        )


class RootExtractRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    urls: str | list[str]
    format: Literal["markdown", "text"] = "markdown"
    include_images: bool = False
    include_favicon: bool = False
    query: str | None = Field(default=None, max_length=512)
    timeout: float = Field(default=30.0, ge=1, le=60)

    def wanted(self) -> list[FetchRequest]:
        """One request a URL, at most MAX_URLS."""
        urls = [self.urls] if isinstance(self.urls, str) else self.urls
        if not 1 <= len(urls) <= MAX_URLS:
            raise InvalidRequestError(
                "invalid_argument",
                f"urls: {len(urls)} given, 1 to {MAX_URLS} are taken",
                details={"limit": "urls", "value": MAX_URLS},
            )
        return [
            FetchRequest(
                url=url,
                format=self.format,
                max_tokens=None,
                timeout=self.timeout,
                query=self.query,
                return_images=self.include_images,
            )
            for url in urls
        ]


def add_root_routes(
    app: FastAPI,
    client: AsyncSearchFetch,
    require: Callable[[str], Callable[[Request], Awaitable[ApiKey]]],
) -> None:
    """POST /search and POST /extract."""

    @app.post("/search", dependencies=[Depends(require("search"))])
    async def root_search(body: RootSearchRequest, request: Request) -> Response:
        started = time.monotonic()
        request_id = call_of(request.scope).request_id

        def shape(found: SearchResponse) -> dict[str, Any]:
            seconds = round(time.monotonic() - started, 2)
            return search_shape(found, body, seconds, request_id)

        return await answer(request, body.wanted(), client.search, shape)

    @app.post("/extract", dependencies=[Depends(require("fetch"))])
    async def root_extract(body: RootExtractRequest, request: Request) -> Response:
        return await _extract(request, client, body)

    _ = (root_search, root_extract)


def search_shape(
    found: SearchResponse, body: RootSearchRequest, seconds: float, request_id: str
) -> dict[str, Any]:
    """Results with `content` (the best passages) and `score` 0..1."""
    results: list[dict[str, Any]] = []
    for r in found.results[: body.max_results]:
        row: dict[str, Any] = {
            "url": r.url,
            "title": r.title,
            "content": r.summary or r.snippet,
            "score": r.score,
            "raw_content": r.content if body.include_raw_content else None,
        }
        if r.published:
            row["published_date"] = r.published
        if body.include_favicon:
            row["favicon"] = None  # the index keeps no icons
        results.append(row)
    return {
        "query": found.query,
        "follow_up_questions": None,
        "answer": None,
        "images": [],
        "results": results,
        "response_time": seconds,
        "request_id": request_id,
    }


async def _extract(
    request: Request, client: AsyncSearchFetch, body: RootExtractRequest
) -> Response:
    service, call = service_of(request), call_of(request.scope)
    started = time.monotonic()

    async def produce() -> StoredAnswer:
        items: list[BatchItem] = [i async for i in client.fetch_many(body.wanted())]
        results: list[dict[str, Any]] = []
        failed: list[dict[str, Any]] = []
        charges: list[Charge] = []
        urls = [r.url for r in body.wanted()]
        for item in sorted(items, key=lambda i: i.index):
            page = item.response
            if page is None:
                error = item.error or {}
                failed.append({"url": urls[item.index], "error": error.get("message", "")})
                continue
            due = charge_for(service, call, page, f".{item.index}")
            if due is not None:
                charges.append(due)
            row: dict[str, Any] = {
                "url": urls[item.index],
                "title": page.title,
                "raw_content": page.content,
                "images": [i.url for i in page.images or ()],
            }
            if body.include_favicon:
                row["favicon"] = page.favicon
            results.append(row)
        shaped = {
            "results": results,
            "failed_results": failed,
            "response_time": round(time.monotonic() - started, 2),
            "request_id": call.request_id,
        }
        text = await asyncio.to_thread(compact, shaped)
        return StoredAnswer(text, tuple(charges))

    return await deliver(request, body.model_dump(mode="json"), produce)
