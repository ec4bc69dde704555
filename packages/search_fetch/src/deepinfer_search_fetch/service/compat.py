"""Drop-in routes with the field names, limits and statuses of a public Search and Fetch API.

Unknown fields are ignored there, as that API does.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import SearchFetchError, UpstreamError
from deepinfer_search_fetch.models import (
    FetchRequest,
    FetchResponse,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.service.answers import answer
from deepinfer_search_fetch.service.auth import ApiKey
from deepinfer_search_fetch.service.problems import validation_error

_SNIPPET_CHARS = 200
_SUMMARY_CHARS = 800
# Statuses that mean the same there; every other failure of a fetch is "could not be fetched", 404.
_KEPT = (400, 401, 402, 429, 500, 503)

M = TypeVar("M", bound=BaseModel)


class CompatSearchRequest(BaseModel):
    """localization: the IP address of the end user (no locale)."""

    model_config = ConfigDict(extra="ignore")

    query: str = Field(min_length=1, max_length=128)
    count: int = Field(default=10, ge=1, le=50)
    need_content: bool = False
    ori_question: str | None = Field(default=None, min_length=1, max_length=128)
    localization: str | None = None

    @field_validator("query")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("query must not be blank")
        return value

    @field_validator("localization")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is not None:
            ipaddress.ip_address(value)
        return value


class CompatResult(BaseModel):
    """rerank_score 0..3, authority -1..4; what is unknown is an empty string."""

    title: str
    url: str
    snippet: str
    summary: str
    content: str
    rerank_score: float
    authority: int
    date: str
    site_name: str
    site_icon: str


class CompatSearchResponse(BaseModel):
    results: list[CompatResult]


class CompatFetchRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    url: str = Field(min_length=1, max_length=8192)


class CompatFetchResponse(BaseModel):
    title: str
    content: str


def add_compat_routes(
    app: FastAPI,
    client: AsyncSearchFetch,
    require: Callable[[str], Callable[[Request], Awaitable[ApiKey]]],
) -> None:
    """POST /v1/tools/search and /v1/tools/fetch; bad arguments are 400 there."""
    fetch_key, search_key = [Depends(require("fetch"))], [Depends(require("search"))]

    @app.post(
        "/v1/tools/search",
        response_model=CompatSearchResponse,
        dependencies=search_key,
        openapi_extra=_documented(CompatSearchRequest),
    )
    async def tools_search(request: Request) -> Response:
        body = await _parse(request, CompatSearchRequest)
        wanted = SearchRequest(
            query=body.query, count=body.count, content="full" if body.need_content else "summary"
        )
        return await answer(request, wanted, client.search, search_shape)

    @app.post(
        "/v1/tools/fetch",
        response_model=CompatFetchResponse,
        dependencies=fetch_key,
        openapi_extra=_documented(CompatFetchRequest),
    )
    async def tools_fetch(request: Request) -> Response:
        body = await _parse(request, CompatFetchRequest)

        async def work(wanted: FetchRequest) -> FetchResponse:
            try:
                return await client.fetch(wanted)
            except SearchFetchError as error:
                raise as_public(error) from error

        return await answer(request, FetchRequest(url=body.url, max_tokens=None), work, fetch_shape)

    _ = (tools_search, tools_fetch)


def as_public(error: SearchFetchError) -> SearchFetchError:
    """The same failure with a status of the public API: a page that cannot be had is a 404."""
    if error.http_status in _KEPT:
        return error
    return UpstreamError(
        error.code,
        error.message,
        http_status=404,
        retryable=error.retryable,
        details=error.details,
    )


def _documented(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}}


async def _parse(request: Request, model: type[M]) -> M:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise validation_error(error, http_status=400) from None


def search_shape(response: SearchResponse) -> dict[str, Any]:
    """The results with rerank_score 0..3 and authority -1..4."""
    return {
        "results": [
            {
                "title": r.title,
                "url": r.url,
                "snippet": r.snippet[:_SNIPPET_CHARS],
                "summary": r.summary[:_SUMMARY_CHARS],
                "content": r.content or "",
                "rerank_score": round(3 * r.score, 2),
                "authority": r.authority.tier,
                "date": r.published or "",
                "site_name": r.site_name,
                "site_icon": "",  # the index keeps no icons, and none is made up
            }
            for r in response.results
        ]
    }


def fetch_shape(response: FetchResponse) -> dict[str, Any]:
    """{"title", "content"} with Markdown content."""
    return {"title": response.title or "", "content": response.content}
