"""Completions: text in, text on; the API below conversations that load generators and tests use."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from deepinfer_engine.server.answer import AnswerResponse
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["completions"])


@router.post("/v1/completions")
@router.post("/completions", include_in_schema=False)
async def completions(request: Request) -> Response:
    """Continue one or more prompts of text or token ids, streaming or in one piece."""
    return AnswerResponse(services_of(request), "completions", request.state.request_id)
