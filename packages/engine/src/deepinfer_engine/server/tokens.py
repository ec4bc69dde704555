"""Tokenizer helpers, in the shape that load generators know from vLLM."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.server.intake import json_object
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Ids of `prompt` (text), or of the whole prompt that `messages` (Chat Completions) becomes."""
    body = await json_object(request)
    services = services_of(request)
    limit = (await services.model_info()).max_model_len
    if "messages" in body:
        body = {"model": services.codec.model_names[0], **body}
        data = json.dumps(body).encode()
        prepare = services.codec.prepare
        prepared = await services.off_loop(prepare, "chat", data, limit, size=len(data))
        tokens = list(prepared.parts[0].token_ids)
    elif isinstance(prompt := body.get("prompt"), str):
        try:
            prompt.encode()
        except UnicodeEncodeError as exc:
            raise InvalidRequest("prompt: lone surrogate in a string", param="prompt") from exc
        tokens = await services.off_loop(services.codec.tokenize, prompt, size=len(prompt))
    else:
        raise InvalidRequest("wanted `prompt` (a string) or `messages` (a list)", param="prompt")
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """Text of `tokens`, special tokens spelled out."""
    body = await json_object(request)
    tokens = body.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InvalidRequest("wanted `tokens`: a list of integers", param="tokens")
    services = services_of(request)
    return {"prompt": await services.off_loop(services.codec.detokenize, tokens, size=len(tokens))}
