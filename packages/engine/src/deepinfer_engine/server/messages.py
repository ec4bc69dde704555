"""Anthropic Messages."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from deepinfer_engine.codec.protocol import Tokenising
from deepinfer_engine.server.answer import AnswerResponse
from deepinfer_engine.server.intake import answered, taken
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["messages"])


@router.post("/v1/messages")
@router.post("/anthropic/v1/messages", include_in_schema=False)
async def messages(request: Request) -> Response:
    """Answer a conversation, streaming or in one piece."""
    return AnswerResponse(services_of(request), "messages", request.state.request_id)


@router.post("/v1/messages/count_tokens")
@router.post("/anthropic/v1/messages/count_tokens", include_in_schema=False)
async def count_tokens(request: Request) -> dict[str, Any]:
    """How many prompt tokens this conversation has; nothing is generated."""
    services = services_of(request)
    async with taken(request) as intake:

        def count(tokenising: Tokenising | None) -> int:
            return services.codec.count_tokens("messages", intake.body, tokenising=tokenising)

        work = services.off_loop(count, size=len(intake.body), caller=intake.caller.key_id)
        return {"input_tokens": await answered(request, work)}
