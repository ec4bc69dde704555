"""Every field of the public request types is decided: honoured, quiet, refused, or reported."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from deepinfer_recipe import ConversionError, Exchange, RequestParseError
from deepinfer_recipe.protocols.chat.request import ChatCompletionRequest
from deepinfer_recipe.protocols.common.fields import (
    QUIET,
    QUIET_ITEMS,
    REFUSED,
    REFUSED_ITEMS,
    ignored_fields,
)
from deepinfer_recipe.protocols.messages.request import MessagesRequest
from deepinfer_recipe.protocols.responses.body import _ITEMS
from deepinfer_recipe.protocols.responses.request import ResponsesRequest

MODEL = "DeepSeek-V4.1-Flash"
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": MODEL, "input": "hi"},
    "messages": {
        "model": MODEL,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    },
}
TYPES = {
    "chat": ChatCompletionRequest.body_type,
    "responses": ResponsesRequest.body_type,
    "messages": MessagesRequest.body_type,
}
# Fields of the official clients' types that no table names: they are reported to the client.
# A new field of a newer client fails the test below until somebody decides it.
REPORTED = {
    "chat": {"logit_bias", "moderation", "prediction", "verbosity", "modalities"},
    "responses": {
        "access_programs",
        "background_options",
        "context_management",
        "image",
        "moderation",
        "multi_agent",
    },
    "messages": {
        "billing_policy",
        "compaction",
        "context_management",  # coding agents send it with every request
        "diagnostics",
        "fallbacks",
        "fallback_credit_token",
        "output_format",
        "speed",
        "top_k",
        "user_profile_id",
        "workspace_id",
    },
}


# Input items of Responses that no table names: they are passed over and reported.
REPORTED_ITEMS = {
    *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call"),
    *("computer_call_output", "configuration_update", "file_search_call"),
    *("image_generation_call", "item_reference", "local_shell_call", "local_shell_call_output"),
    *("mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
    *("program", "program_output", "shell_call", "shell_call_output"),
}
HONOURED_BLOCKS = {
    *("text", "image", "document", "search_result", "thinking", "redacted_thinking"),
    *("tool_use", "tool_result", "server_tool_use", "web_search_tool_result"),
}
CLIENT_TOOLS = ("bash_", "text_editor_", "memory_", "computer_")
"""Kinds of Messages tools that run at the client."""


def kinds_of(union: Any) -> set[str]:
    """The values of `type` in the members of a union of official types."""
    found: set[str] = set()
    for member in get_args(union):
        hints = get_type_hints(member) if isinstance(member, type) else {}
        values = get_args(hints.get("type")) or (member,)
        found |= {
            name
            for value in values
            for name in get_args(value) or (value,)
            if isinstance(name, str)
        }
    return found


@pytest.mark.slow  # like the fields: a newer client has kinds that nobody decided yet
def test_each_kind_of_input_item_is_decided() -> None:
    pytest.importorskip("openai", reason="compares with the official client's types")
    from openai.types.responses import ResponseInputItemParam

    official = kinds_of(ResponseInputItemParam)
    assert len(official) > 20
    assert official - set(_ITEMS) - set(REFUSED_ITEMS) - QUIET_ITEMS - REPORTED_ITEMS == set()
    body = {**BODIES["responses"], "input": [{"role": "user", "content": "hi"}]}
    for kind in sorted(official - set(_ITEMS)):
        asked = {**body, "input": [*body["input"], {"type": kind, "id": "x"}]}
        assert Exchange("responses", asked, profile="parity").ignored_fields == ()
        if kind in REFUSED_ITEMS:
            with pytest.raises(RequestParseError, match=f"`{kind}` is not supported"):
                Exchange("responses", asked)
            continue
        told = () if kind in QUIET_ITEMS else (f"input.{kind}",)
        assert Exchange("responses", asked).ignored_fields == told


@pytest.mark.slow
def test_each_kind_of_block_and_tool_is_honoured_or_refused() -> None:
    pytest.importorskip("anthropic", reason="compares with the official client's types")
    pytest.importorskip("openai", reason="compares with the official client's types")
    from anthropic.types import ContentBlockParam, ToolUnionParam
    from openai.types.responses import ToolParam

    blocks = kinds_of(ContentBlockParam)
    assert blocks >= HONOURED_BLOCKS
    for kind in blocks - HONOURED_BLOCKS:
        turn = {"role": "user", "content": [{"type": kind}]}
        with pytest.raises(RequestParseError, match=kind):
            Exchange("messages", {**BODIES["messages"], "messages": [turn]})
    for kind in kinds_of(ToolUnionParam) - {"custom"}:
        asked = {**BODIES["messages"], "tools": [{"type": kind, "name": "x"}]}
        if kind.startswith(CLIENT_TOOLS):
            assert Exchange("messages", asked).request
        else:
            with pytest.raises((RequestParseError, ConversionError), match=r"tools(\[0\]|\.0)"):
                Exchange("messages", asked)
    for kind in kinds_of(ToolParam) - {"function", "custom", "namespace", "tool_search"}:
        asked = {**BODIES["responses"], "tools": [{"type": kind}]}
        if kind in ("web_search", "web_search_2025_08_26"):
            continue
        with pytest.raises(RequestParseError, match=f"no tool of type `{kind}`"):
            Exchange("responses", asked)


def official_fields(protocol: str) -> set[str]:
    if protocol == "messages":
        pytest.importorskip("anthropic", reason="compares with the official client's types")
        from anthropic.types import message_create_params as plain
        from anthropic.types.beta import message_create_params as beta

        kinds = (plain.MessageCreateParamsBase, beta.MessageCreateParamsBase)
        extra = {"stream"}
    else:
        pytest.importorskip("openai", reason="compares with the official client's types")
        from openai.types.chat import completion_create_params as chat
        from openai.types.responses import response_create_params as responses

        module = chat.CompletionCreateParamsBase
        kinds = (module if protocol == "chat" else responses.ResponseCreateParamsBase,)
        extra = {"stream"}
    return extra | {name for kind in kinds for name in kind.__annotations__}


@pytest.mark.slow  # with the clients' session: a newer client has fields that nobody decided yet
@pytest.mark.parametrize("protocol", BODIES)
def test_each_field_of_the_official_clients_is_decided(protocol: str) -> None:
    honoured = set(TYPES[protocol].model_fields)
    decided = honoured | QUIET[protocol] | set(REFUSED[protocol]) | REPORTED[protocol]
    assert official_fields(protocol) - decided == set()


@pytest.mark.parametrize("protocol", BODIES)
def test_the_tables_do_not_contradict_each_other(protocol: str) -> None:
    honoured = set(TYPES[protocol].model_fields)
    refused = set(REFUSED[protocol])
    assert not QUIET[protocol] & refused
    assert not honoured & refused
    assert not (honoured | refused) & REPORTED[protocol]


@pytest.mark.parametrize(
    ("protocol", "name"), [(p, name) for p, names in REFUSED.items() for name in names]
)
def test_a_field_that_changes_the_meaning_is_refused_by_name(protocol: str, name: str) -> None:
    with pytest.raises(ConversionError, match=f"^{name}: not supported") as caught:
        Exchange(protocol, {**BODIES[protocol], name: {"type": "x"}})
    assert caught.value.param == name
    assert caught.value.status_code == 400
    Exchange(protocol, {**BODIES[protocol], name: None})  # asks for nothing
    if protocol != "responses" or name != "conversation":
        Exchange(protocol, {**BODIES[protocol], name: {"type": "x"}}, profile="parity")


def test_a_thread_is_refused_with_the_code_that_clients_look_for() -> None:
    with pytest.raises(ConversionError) as caught:
        Exchange("messages", {**BODIES["messages"], "thread": {"type": "create"}})
    assert caught.value.code == "thread_unsupported_request"


def test_speech_is_refused_text_alone_is_not() -> None:
    with pytest.raises(ConversionError, match="modalities"):
        Exchange("chat", {**BODIES["chat"], "modalities": ["text", "audio"]})
    assert Exchange("chat", {**BODIES["chat"], "modalities": ["text"]}).request


@pytest.mark.parametrize("protocol", BODIES)
def test_unknown_fields_are_told_and_quiet_ones_are_not(protocol: str) -> None:
    quiet = dict.fromkeys(QUIET[protocol] - {"stream_options", "include", "store"}, "x")
    exchange = Exchange(
        protocol, {**BODIES[protocol], "wizardry": 1, "abra": [1], "empty": None, **quiet}
    )
    assert exchange.ignored_fields == ("abra", "wizardry")
    parity = Exchange(protocol, {**BODIES[protocol], "wizardry": 1}, profile="parity")
    assert parity.ignored_fields == ()


def test_names_of_aliased_fields_are_known() -> None:
    assert ignored_fields("chat", TYPES["chat"], BODIES["chat"]) == ()
