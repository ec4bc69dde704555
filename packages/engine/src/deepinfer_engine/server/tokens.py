"""Tokenizer helpers, in the shape that load generators know from vLLM."""

from __future__ import annotations

import json
from typing import Any, cast

from fastapi import APIRouter, Request

from deepinfer_engine.codec.errors import InvalidRequest
from deepinfer_engine.codec.protocol import Tokenising
from deepinfer_engine.server.intake import answered, taken
from deepinfer_engine.server.services import services_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Ids of `prompt` (text), or of the whole prompt that `messages` (Chat Completions) becomes."""
    services = services_of(request)
    async with taken(request) as intake:
        body, limit = intake.json_object(), intake.max_model_len
        if "messages" in body:
            body = {"model": services.codec.model_names[0], **body}
            data = json.dumps(body).encode()

            def encode(tokenising: Tokenising | None) -> list[int]:
                prepared = services.codec.prepare("chat", data, limit, tokenising=tokenising)
                return list(prepared.parts[0].token_ids)
        elif isinstance(prompt := body.get("prompt"), str):
            try:
                data = prompt.encode()
            except UnicodeEncodeError as exc:
                raise InvalidRequest("prompt: lone surrogate in a string", param="prompt") from exc

            def encode(tokenising: Tokenising | None) -> list[int]:
                return services.codec.tokenize(prompt, tokenising=tokenising)
        else:
            raise InvalidRequest(
                "wanted `prompt` (a string) or `messages` (a list)", param="prompt"
            )
        work = services.off_loop(encode, size=len(data), caller=intake.caller.key_id)
        tokens = await answered(request, work)
    return {"count": len(tokens), "max_model_len": limit, "tokens": tokens}


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """Text of `tokens`, special tokens spelled out."""
    services = services_of(request)
    async with taken(request) as intake:
        tokens = intake.json_object().get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise InvalidRequest("wanted `tokens`: a list of integers", param="tokens")
        ids = cast("list[int]", tokens)
        work = services.off_loop(
            lambda _: services.codec.detokenize(ids), size=len(ids), caller=intake.caller.key_id
        )
        return {"prompt": await answered(request, work)}
