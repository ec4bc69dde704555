"""Drop-in routes with the field names of a public Search and Fetch API.

Unknown fields are ignored there, as that API does.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import InvalidRequestError
from deepinfer_search_fetch.models import (
    FetchRequest,
    FetchResponse,
    SearchRequest,
    SearchResponse,
)
from deepinfer_search_fetch.service.auth import ApiKey

_SNIPPET_CHARS = 200
_SUMMARY_CHARS = 800


class CompatSearchRequest(BaseModel):
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


class CompatFetchRequest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    url: str = Field(min_length=1, max_length=8192)


def add_compat_routes(
    app: FastAPI,
    client: AsyncSearchFetch,
    require: Callable[[str], Callable[[Request], ApiKey]],
    answer: Callable[..., Awaitable[Response]],
) -> None:
    """POST /v1/tools/search and /v1/tools/fetch; bad arguments are 400 there."""

    @app.post("/v1/tools/search")
    async def tools_search(
        request: Request,
        key: ApiKey = Depends(require("search")),  # noqa: B008
    ) -> Response:
        body = await _parse(request, CompatSearchRequest)
        native = SearchRequest(
            query=body.query, count=body.count, content="full" if body.need_content else "summary"
        )
        return await answer(request, key, native, client.search, search_shape)

    @app.post("/v1/tools/fetch")
    async def tools_fetch(
        request: Request,
        key: ApiKey = Depends(require("fetch")),  # noqa: B008
    ) -> Response:
        body = await _parse(request, CompatFetchRequest)
        native = FetchRequest(url=body.url, max_tokens=None)
        return await answer(request, key, native, client.fetch, fetch_shape)

    _ = (tools_search, tools_fetch)


async def _parse(request: Request, model: type[Any]) -> Any:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        raise InvalidRequestError(
            "invalid_argument", f"{field}: {first['msg']}", http_status=400
        ) from None


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
                "site_icon": "",
            }
            for r in response.results
        ]
    }


def fetch_shape(response: FetchResponse) -> dict[str, Any]:
    """{"title", "content"} with Markdown content."""
    return {"title": response.title or "", "content": response.content}
