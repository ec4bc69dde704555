"""OpenAI Responses, without a store: the whole history comes with every request."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deepinfer_engine.server.answer import AnswerResponse
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["responses"])


@router.post("/v1/responses")
@router.post("/responses", include_in_schema=False)
async def responses(request: Request) -> Response:
    """Answer a conversation, streaming or in one piece."""
    return AnswerResponse(services_of(request), "responses", request.state.request_id)
