"""Fields of request bodies that mean nothing to this codec: which are passed over, which refused.

Every field of the current public request types of the three APIs is one of: part of the body
model (honoured), QUIET here (its loss changes nothing that a client can see), or REFUSED here
(passed over, the answer would be to another request). All other names are reported by
`ignored_fields`, so that a server can name them to the client. `tests/test_fields.py` holds the
tables against the types of the official clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_recipe.base.errors import ConversionError
from deepinfer_recipe.protocols.common.body import Body

_OPENAI_QUIET = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
    }
)
QUIET: dict[str, frozenset[str]] = {
    "chat": _OPENAI_QUIET,
    "responses": _OPENAI_QUIET | {"client_metadata", "include", "truncation"},
    "messages": frozenset({"cache_control", "inference_geo", "service_tier", "betas"}),
}
"""Hints of storage, routing, billing and caching, and labels that only the caller reads."""

REFUSED: dict[str, dict[str, str]] = {
    "chat": {
        "audio": "this model speaks text alone",
        "function_call": "use `tool_choice`",
        "functions": "use `tools`",
        "web_search_options": "declare a web search in Responses or Messages instead",
    },
    "responses": {
        "background": "ask for a stream, or wait for the answer",
        "conversation": "use `previous_response_id`, or send the history in `input`",
        "prompt": "this server keeps no prompt templates; send `instructions` and `input`",
    },
    "messages": {
        "container": "this server runs no containers",
        "mcp_servers": "connect to the MCP server at the client, and declare its tools",
        "thread": "this server keeps no threads; send the whole history in `messages`",
    },
}
"""Fields that change what is asked for, with what to do instead. Empty values ask for nothing."""

REFUSED_ITEMS: dict[str, str] = {
    "compaction": "this server cannot read what another one compacted; send the items themselves",
    "compaction_trigger": "this server compacts nothing; send a request without it",
}
"""Input items of Responses whose loss would change what is asked for, with what to do instead."""
QUIET_ITEMS = frozenset({"web_search_call"})
"""Input items of Responses that say nothing to a model: what was found stands in the answer."""

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The code by which clients of Messages know to send the whole history again."""


def _names(model: type[Body]) -> frozenset[str]:
    fields = model.model_fields
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}


def ignored_fields(protocol: str, model: type[Body], fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Top-level names of a decoded body that are neither honoured nor without effect, sorted."""
    known = _names(model) | QUIET[protocol] | set(REFUSED[protocol])
    return tuple(sorted(name for name, value in fields.items() if name not in known and value))


def refuse_unserved(protocol: str, fields: Mapping[str, Any]) -> None:
    """Raise `ConversionError` for a field whose loss would change what the request means."""
    for name, advice in REFUSED[protocol].items():
        if fields.get(name):
            code = THREAD_UNSUPPORTED if name == "thread" else "unsupported_parameter"
            raise ConversionError(f"{name}: not supported; {advice}", param=name, code=code)
    modalities = fields.get("modalities")
    if protocol == "chat" and isinstance(modalities, list) and modalities not in ([], ["text"]):
        raise ConversionError(
            "modalities: this model speaks text alone",
            param="modalities",
            code="unsupported_parameter",
        )
