"""JSON Schemas of what the routes answer, for the OpenAPI document.

What is listed is promised; more may be there, as clients of these protocols expect.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
ANYTHING: Schema = {"type": "object"}


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def many(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def thing(optional: dict[str, Schema] | None = None, /, **properties: Schema) -> Schema:
    """An object that has these properties, and may have the optional ones."""
    return {
        "type": "object",
        "properties": {**properties, **(optional or {})},
        "required": list(properties),
    }


_TOKEN_LOGPROB = thing(token=TEXT, logprob=NUMBER, bytes=or_null(many(COUNT)))
_TOKEN_LOGPROBS = many(
    {"allOf": [_TOKEN_LOGPROB, thing(top_logprobs=many(_TOKEN_LOGPROB))]}
)  # fmt: skip
_CHAT_USAGE = thing(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=thing(cached_tokens=COUNT),
    completion_tokens_details=thing(reasoning_tokens=COUNT),
    prompt_cache_hit_tokens=COUNT,
    prompt_cache_miss_tokens=COUNT,
)
_CALL = thing(id=TEXT, type=TEXT)
_FINISH = one_of("stop", "length", "tool_calls", "content_filter", "insufficient_system_resource")
_CHAT = thing(
    id=TEXT,
    object=one_of("chat.completion"),
    created=COUNT,
    model=TEXT,
    choices=many(
        thing(
            {
                "logprobs": or_null(
                    thing({"content": or_null(_TOKEN_LOGPROBS),
                           "reasoning_content": or_null(_TOKEN_LOGPROBS)})
                ),
            },
            index=COUNT,
            message=thing(
                {"reasoning_content": or_null(TEXT), "tool_calls": or_null(many(_CALL))},
                role=one_of("assistant"),
                content=or_null(TEXT),
            ),
            finish_reason=_FINISH,
        )
    ),
    usage=_CHAT_USAGE,
)  # fmt: skip
_COMPLETION = thing(
    id=TEXT,
    object=one_of("text_completion"),
    created=COUNT,
    model=TEXT,
    choices=many(
        thing(
            {"logprobs": or_null(ANYTHING)},
            index=COUNT,
            text=TEXT,
            finish_reason=or_null(_FINISH),
        )
    ),
    usage=thing(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
)
_RESPONSE = thing(
    id=TEXT,
    object=one_of("response"),
    created_at=COUNT,
    status=one_of("completed", "incomplete", "failed", "in_progress", "cancelled"),
    error=or_null(ANYTHING),
    incomplete_details=or_null(thing(reason=TEXT)),
    model=TEXT,
    output=many(thing(type=TEXT)),
    usage=or_null(
        thing(
            input_tokens=COUNT,
            input_tokens_details=thing(cached_tokens=COUNT),
            output_tokens=COUNT,
            output_tokens_details=thing(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        )
    ),
)
_MESSAGE = thing(
    id=TEXT,
    type=one_of("message"),
    role=one_of("assistant"),
    model=TEXT,
    content=many(thing(type=TEXT)),
    stop_reason=one_of(
        "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal",
        "model_context_window_exceeded",
    ),
    stop_sequence=or_null(TEXT),
    usage=thing(
        input_tokens=COUNT,
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
    ),
)  # fmt: skip
_OPENAI_MODEL = thing(
    id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT
)
_MESSAGES_MODEL = thing(type=one_of("model"), id=TEXT, display_name=TEXT, created_at=TEXT)
_WORKER = thing(
    name=TEXT, role=TEXT, ready=FLAG, detail=TEXT, pid=or_null(COUNT), epoch=COUNT
)  # fmt: skip

READINESS = thing(
    {"in_flight": COUNT, "workers": many(_WORKER), "problems": many(TEXT)},
    status=one_of("ready", "not ready", "draining"),
)
_OPENAI_ERROR = thing(
    error=thing(message=TEXT, type=TEXT, param=or_null(TEXT), code=or_null(TEXT))
)  # fmt: skip
_MESSAGES_ERROR = thing(type=one_of("error"), error=thing(type=TEXT, message=TEXT))

ERROR: Schema = {
    "description": "OpenAI's shape, or for Messages Anthropic's.",
    "anyOf": [_OPENAI_ERROR, _MESSAGES_ERROR],
}

_FLEET = thing(
    draining=FLAG,
    running=COUNT,
    workers=many(
        thing(
            {"pid": or_null(COUNT)},
            name=TEXT,
            role=TEXT,
            ready=FLAG,
            draining=FLAG,
            running=COUNT,
            detail=TEXT,
            epoch=COUNT,
        )
    ),
)

ANSWERS: dict[str, dict[str, Schema]] = {
    "/v1/chat/completions": {"post": _CHAT},
    "/v1/completions": {"post": _COMPLETION},
    "/v1/responses": {"post": _RESPONSE},
    "/v1/responses/input_tokens": {
        "post": thing(object=one_of("response.input_tokens"), input_tokens=COUNT)
    },
    "/v1/responses/{response_id}": {
        "get": _RESPONSE,
        "delete": thing(id=TEXT, object=one_of("response"), deleted=FLAG),
    },
    "/v1/responses/{response_id}/input_items": {
        "get": thing(object=one_of("list"), data=many(ANYTHING), has_more=FLAG)
    },
    "/v1/messages": {"post": _MESSAGE},
    "/v1/messages/count_tokens": {"post": thing(input_tokens=COUNT)},
    "/v1/models": {
        "get": {
            "anyOf": [
                thing(object=one_of("list"), data=many(_OPENAI_MODEL)),
                thing(data=many(_MESSAGES_MODEL), has_more=FLAG, first_id=TEXT, last_id=TEXT),
            ]
        }
    },
    "/v1/models/{name}": {"get": {"anyOf": [_OPENAI_MODEL, _MESSAGES_MODEL]}},
    "/health": {"get": READINESS},
    "/health/ready": {"get": READINESS},
    "/health/live": {"get": thing(status=one_of("alive"))},
    "/v1/usage": {
        "get": thing(
            object=one_of("usage"),
            by=many(TEXT),
            data=many(
                thing(
                    answers=COUNT,
                    prompt_tokens=COUNT,
                    cached_tokens=COUNT,
                    output_tokens=COUNT,
                    cost=TEXT,
                    currency=TEXT,
                    unsettled=COUNT,
                )
            ),
        )
    },
    "/status": {
        "get": thing(
            status=one_of("ready", "not ready", "draining"),
            version=TEXT,
            models=many(TEXT),
            in_flight=COUNT,
            workers=many(thing(name=TEXT, role=TEXT, ready=FLAG, draining=FLAG, detail=TEXT)),
            problems=many(TEXT),
            recent=thing(seconds=NUMBER, requests=COUNT, ttft=ANYTHING, token_gap=ANYTHING),
        )
    },
    "/version": {"get": thing(version=TEXT, models=many(TEXT))},
    "/tokenize": {"post": thing(count=COUNT, max_model_len=COUNT, tokens=many(COUNT))},
    "/detokenize": {"post": thing(prompt=TEXT)},
    "/admin/flush": {"post": thing(flushed=FLAG)},
    "/admin/workers": {"get": _FLEET},
    "/admin/drain": {"post": _FLEET},
}
"""By path and method, the body of a 200 in JSON."""

EVENT = thing({"event": TEXT, "id": TEXT}, data=TEXT)
"""One server-sent event; `data` is JSON, or `[DONE]`."""

STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""With `stream`, these answer as server-sent events."""
