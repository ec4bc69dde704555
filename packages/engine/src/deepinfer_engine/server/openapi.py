"""The OpenAPI document: routes from the application, bodies from the models that read them, answers
from `answer_schemas`."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deepinfer_engine.codec.schemas import request_schemas
from deepinfer_engine.server.answer_schemas import ANSWERS, ERROR, EVENT, READINESS, STREAMED
from deepinfer_engine.server.fleet import DrainOrder

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
    "DrainRequest": DrainOrder.model_json_schema(),
    "Error": ERROR,
    "Readiness": READINESS,
}
_OWN_BODIES = {
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
    "/admin/drain": "DrainRequest",
}


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
    for path, methods in document["paths"].items():
        body = _BODIES.get(path) or _OWN_BODIES.get(path)
        for method, operation in methods.items():
            operation["responses"] = _responses(path, method)
            if body is not None and method == "post":
                schema = {"$ref": f"#/components/schemas/{body}"}
                operation["requestBody"] = {
                    "required": True,
                    "content": {"application/json": {"schema": schema}},
                }
    return document


def _responses(path: str, method: str) -> dict[str, Any]:
    """What an operation answers, by status."""
    found: dict[str, Any] = {
        "4XX": _json("refused; the body says why", "Error"),
        "5XX": _json("failed, or no worker can take it now; the body says why", "Error"),
    }
    if path in ("/health", "/health/ready"):
        found["503"] = _json("a request would not be taken now", "Readiness")
    answer = ANSWERS.get(path, {}).get(method)
    if answer is not None:
        content = {"application/json": {"schema": answer}}
        if path in STREAMED:
            content["text/event-stream"] = {"schema": EVENT}
        found["200"] = {"description": "the answer", "content": content}
    elif path == "/metrics":
        types = ("text/plain", "application/openmetrics-text")
        content = {name: {"schema": {"type": "string"}} for name in types}
        found["200"] = {"description": "for Prometheus", "content": content}
    return found


def _json(description: str, name: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}
