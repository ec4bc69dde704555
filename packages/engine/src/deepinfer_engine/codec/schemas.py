"""JSON Schemas of what clients send, from the models that read it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from deepinfer_engine.adapters.recipe import REQUEST_BODIES
from deepinfer_engine.codec.completions import Body as CompletionsBody

REQUESTS_VERSION = 2
"""Of the request bodies below; a test holds it and them together."""


def request_models() -> dict[str, type[BaseModel]]:
    """By the name that it has in the OpenAPI document."""
    models: dict[str, type[BaseModel]] = {
        "ChatCompletionsRequest": REQUEST_BODIES["chat"],
        "ResponsesRequest": REQUEST_BODIES["responses"],
        "MessagesRequest": REQUEST_BODIES["messages"],
        "CompletionsRequest": CompletionsBody,
    }
    return models


def request_schemas() -> dict[str, dict[str, Any]]:
    """The schemas of all bodies and of what they are made of, each name prefixed by its body's."""
    found: dict[str, dict[str, Any]] = {}
    for name, model in request_models().items():
        template = f"#/components/schemas/{name}.{{model}}"
        schema = model.model_json_schema(ref_template=template)
        for inner, value in schema.pop("$defs", {}).items():
            found[f"{name}.{inner}"] = value
        found[name] = schema
    return found
