"""The OpenAPI document: routes from the application, bodies from the models that read them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deepinfer_engine.codec.schemas import request_schemas

_BODIES = {
    "/v1/chat/completions": "ChatCompletionsRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/responses/input_tokens": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/anthropic/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "MessagesRequest",
    "/v1/completions": "CompletionsRequest",
}
_OWN: dict[str, dict[str, Any]] = {
    "TokenizeRequest": {
        "type": "object",
        "properties": {"prompt": {"type": "string"}, "messages": {"type": "array"}},
        "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
    "DetokenizeRequest": {
        "type": "object",
        "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
        "required": ["tokens"],
    },
    "Error": {
        "description": "OpenAI's shape, or for Messages Anthropic's.",
        "type": "object",
        "properties": {"error": {"type": "object"}, "type": {"const": "error"}},
        "required": ["error"],
    },
}
_OWN_BODIES = {"/tokenize": "TokenizeRequest", "/detokenize": "DetokenizeRequest"}


def describe(app: FastAPI) -> None:
    """Make `/openapi.json` tell request bodies and errors too."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= request_schemas() | _OWN
    # Parameters are checked by the routes themselves, in the shape of the caller's protocol.
    schemas.pop("HTTPValidationError", None)
    schemas.pop("ValidationError", None)
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for path, methods in document["paths"].items():
        body = _BODIES.get(path) or _OWN_BODIES.get(path)
        for operation in methods.values():
            responses = operation["responses"]
            responses.pop("422", None)
            responses["4XX"] = {"description": "refused; the body says why", **error}
            responses["503"] = {"description": "no worker can take it now", **error}
            if body is not None and "get" not in methods:
                schema = {"$ref": f"#/components/schemas/{body}"}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
    return document
