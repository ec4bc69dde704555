"""OpenAI Responses. With a store, answers are kept for their owner and can be continued; without
one, the whole history comes with every request."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from deepinfer_engine.codec.errors import InvalidRequest, NotFound
from deepinfer_engine.codec.protocol import KeptResponses, Tokenising
from deepinfer_engine.server.answer import AnswerResponse
from deepinfer_engine.server.intake import answered, identified, taken
from deepinfer_engine.server.manners import not_found
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["responses"])


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(request: Request) -> Response:
    """Answer a conversation, streaming or in one piece."""
    return AnswerResponse(services_of(request), "responses", request.state.request_id)


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> dict[str, Any]:
    """How many prompt tokens a request of this API has; nothing is generated."""
    services = services_of(request)
    async with taken(request) as intake:

        def count(tokenising: Tokenising | None) -> int:
            return services.codec.count_tokens("responses", intake.body, tokenising=tokenising)

        work = services.off_loop(count, size=len(intake.body), caller=intake.caller.key_id)
        found = await answered(request, work)
    return {"object": "response.input_tokens", "input_tokens": found}


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(request: Request) -> None:
    """Not here, and said so."""
    raise not_found("POST", request.url.path)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> None:
    """Answers run in the foreground here: closing the connection ends them."""
    identified(request)
    raise InvalidRequest(
        f"{response_id[:100]} does not run in the background: close its connection to end it",
        param="response_id",
    )


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    """A kept answer of this caller."""
    owner, kept = identified(request).owner, _kept(request)
    return _found(response_id, await asyncio.to_thread(kept.get, owner, response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    """Delete a kept answer of this caller; what builds on it can no longer be continued."""
    owner, kept = identified(request).owner, _kept(request)
    if not await asyncio.to_thread(kept.delete, owner, response_id):
        raise _missing(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[str, Query()] = "20",
    order: str = "desc",
) -> dict[str, Any]:
    """What the request of a kept answer brought, page by page."""
    owner, kept = identified(request).owner, _kept(request)
    if not re.fullmatch("[0-9]{1,8}", limit):
        raise InvalidRequest(f"limit: expected 1 to 100, got {limit[:40]!r}", param="limit")
    page = await asyncio.to_thread(
        kept.input_items, owner, response_id, limit=int(limit), after=after, order=order
    )
    return _found(response_id, page)


def _kept(request: Request) -> KeptResponses:
    kept = services_of(request).codec.kept_responses
    if kept is None:
        raise NotFound("this server keeps no responses; --responses-store switches that on")
    return kept


def _found(response_id: str, value: dict[str, Any] | None) -> dict[str, Any]:
    if value is None:
        raise _missing(response_id)
    return value


def _missing(response_id: str) -> NotFound:
    return NotFound(f"Response with id '{response_id[:100]}' not found.", param="response_id")
