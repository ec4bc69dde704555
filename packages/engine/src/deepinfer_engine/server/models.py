"""The models this server answers for: OpenAI's list, or the Messages list for `anthropic-version`
clients.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from deepinfer_engine.errors import UnknownModel
from deepinfer_engine.server.intake import identified
from deepinfer_engine.server.services import Services, protocol_of, services_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
@router.get("/v1/models/", include_in_schema=False)
@router.get("/models", include_in_schema=False)
async def list_models(request: Request) -> dict[str, Any]:
    """Every name a request may use."""
    identified(request)
    services = services_of(request)
    names = services.codec.model_names
    if protocol_of("", request.headers) == "messages":
        data = [_messages_entry(request, name) for name in names]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {
        "object": "list",
        "data": [await _openai_entry(request, services, name) for name in names],
    }


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    """One of them; 404 for any other."""
    identified(request)
    services = services_of(request)
    if name not in services.codec.model_names:
        raise UnknownModel(name, services.codec.model_names)
    if protocol_of("", request.headers) == "messages":
        return _messages_entry(request, name)
    return await _openai_entry(request, services, name)


async def _openai_entry(request: Request, services: Services, name: str) -> dict[str, Any]:
    info = await services.model_info()
    return {
        "id": name,
        "object": "model",
        "created": int(request.app.state.started),
        "owned_by": "deepinfer",
        "max_model_len": info.max_model_len,
    }


def _messages_entry(request: Request, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(request.app.state.started), UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
