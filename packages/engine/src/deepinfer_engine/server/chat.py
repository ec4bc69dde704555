"""Chat Completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deepinfer_engine.server.answer import AnswerResponse
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["chat completions"])


@router.post("/v1/chat/completions")
@router.post("/chat/completions", include_in_schema=False)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streaming or in one piece."""
    return AnswerResponse(services_of(request), "chat", request.state.request_id)
