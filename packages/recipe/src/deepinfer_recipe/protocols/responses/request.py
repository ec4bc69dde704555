"""Responses requests, and the protocol as one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepinfer_recipe.base.errors import RequestParseError
from deepinfer_recipe.base.json_text import load_body
from deepinfer_recipe.conversation.policy import Profile, policy_of
from deepinfer_recipe.protocols.common.body import parse_body
from deepinfer_recipe.protocols.common.builder import resolve_model
from deepinfer_recipe.protocols.common.codec import ParsedRequest, ProtocolCodec, StoredTurn
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.fields import QUIET_ITEMS, REFUSED_ITEMS
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.common.request import (
    ProtocolRequest,
    RequestBody,
    starts_in_reasoning,
)
from deepinfer_recipe.protocols.responses import convert
from deepinfer_recipe.protocols.responses.body import (
    AdditionalToolsItem,
    ResponsesBody,
    parse_items,
    parse_tools,
    unknown_items,
)
from deepinfer_recipe.protocols.responses.echo import ResponsesEcho
from deepinfer_recipe.protocols.responses.events import (
    ResponsesChunkGenerator,
    ResponsesResponse,
    Seal,
)
from deepinfer_recipe.protocols.responses.items import ParsedResponses
from deepinfer_recipe.protocols.responses.stored_turn import (
    ResponseTurn,
    dereferenced,
    message_item,
)
from deepinfer_recipe.protocols.responses.tools import custom_names, namespace_map
from deepinfer_recipe.stores.response_store import ResponseStore


@dataclass(frozen=True, slots=True)
class _ResponsesSettings:
    echo: ResponsesEcho
    namespaces: dict[str, tuple[str, str]]
    custom_tools: tuple[str, ...]
    seal: Seal | None = None


def _seal(body: ResponsesBody, options: ConversionOptions) -> Seal | None:
    """How reasoning is sealed for the client: only where it asked for it."""
    sealer = options.reasoning_sealer
    if sealer is None:
        return None
    include = body.include if isinstance(body.include, list) else []
    return sealer.seal if "reasoning.encrypted_content" in include else lambda text: None


class ResponsesRequest(ProtocolRequest[ParsedResponses]):
    """A Responses request; even failed conversion consumes it. Errors as in Chat Completions."""

    __slots__ = ()

    protocol = "responses"
    body_type = ResponsesBody

    def __init__(
        self,
        body: RequestBody,
        *,
        profile: Profile = "parity",
        history: Sequence[dict[str, Any]] | None = None,
        stores: bool = False,
    ) -> None:
        """In the extended profile, `history` holds the items that `previous_response_id` stands
        for, and `stores` tells whether the answer will be kept; see `ResponseTurn`.

        Raises RequestParseError for a body that is no such request.
        """
        policy = policy_of(profile)
        fields = load_body(body)
        parsed = parse_body(ResponsesBody, fields)
        convert.check_profile(parsed, policy)
        given = parsed.input
        if history is not None:
            own = [message_item(given)] if isinstance(given, str) else given or []
            given = [*history, *own]
        refused = REFUSED_ITEMS if policy.refuses_unserved_fields else None
        earlier = len(history or ())
        items = parse_items(given, earlier, refused) if isinstance(given, list) else None
        refuses = policy.refuses_unknown_tools
        tools = parse_tools(parsed.tools or [], refuses_others=refuses)
        for index, item in items or ():
            if isinstance(item, AdditionalToolsItem) and policy.reads_newer_blocks:
                place = f"input[{index}].tools"
                if not isinstance(item.tools, list):
                    message = f"invalid request body: expected a list (at {place})"
                    raise RequestParseError(message, param=place)
                tools += parse_tools(item.tools, place, refuses_others=refuses)
        continues = history is not None
        whole = ParsedResponses(parsed, items, tools, continues, stores)
        super().__init__(whole, fields, policy)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Also kinds of input items that were passed over, as `input.kind`."""
        given = self.fields.get("input")
        if not self._policy.refuses_unserved_fields or not isinstance(given, list):
            return super().ignored_fields
        kinds = unknown_items(given) - QUIET_ITEMS
        return (*super().ignored_fields, *(f"input.{kind:.60}" for kind in sorted(kinds)))

    def namespace_tool_map(self, options: ConversionOptions) -> dict[str, tuple[str, str]]:
        """Return the function names of the declared namespace tools.

        Each function name maps to `(namespace, local name)`; read them before `convert`
        consumes this request. Raises `ConversionError` for an invalid tool declaration.
        """
        parsed = self._peek()
        version = resolve_model(parsed.model, options, self._policy)
        return namespace_map(parsed.tools, version.prompt_format)

    def echo(self) -> ResponsesEcho:
        """Return the request settings that responses report; read them before `convert`."""
        parsed = self._peek()
        return ResponsesEcho.of(parsed.body, parsed.tools)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        parsed = self._take()
        request = convert.convert(parsed, options, self._policy)
        form = request.model_version.prompt_format
        custom = custom_names(parsed.tools, form)
        namespaces = namespace_map(parsed.tools, form)
        echo = ResponsesEcho.of(parsed.body, parsed.tools)
        if self._policy.uses_response_store:
            echo = echo.of_stored(parsed.body, stores=parsed.stores)
        settings = _ResponsesSettings(
            echo,
            namespaces,
            custom,
            _seal(parsed.body, options) if self._policy.uses_response_store else None,
        )
        return request.with_answer_settings(settings)

    @staticmethod
    def chunk_generator(
        request: ConversationRequest,
        id: str,
        model: str,
        *,
        created: int | None = None,
        call_ids: CallIds | None = None,
    ) -> ResponsesChunkGenerator:
        """The generator of the answer to a converted request."""
        settings = request.answer_settings
        if not isinstance(settings, _ResponsesSettings):
            settings = _ResponsesSettings(ResponsesEcho(), {}, ())
        return ResponsesChunkGenerator(
            id,
            model,
            echo=settings.echo,
            namespace_tool_map=settings.namespaces,
            custom_tools=settings.custom_tools,
            seal=settings.seal,
            thinking_mode=starts_in_reasoning(request),
            policy=request.policy,
            created=created,
            call_ids=call_ids,
        )


def _parse(
    body: RequestBody, profile: Profile, store: ResponseStore | None, owner: str
) -> tuple[ParsedRequest, StoredTurn | None]:
    if store is None or not policy_of(profile).uses_response_store:
        return ResponsesRequest(body, profile=profile), None
    decoded = load_body(body)
    if not isinstance(decoded, dict):
        return ResponsesRequest(body, profile=profile), None
    decoded = {**decoded, "input": dereferenced(decoded.get("input"), store, owner)}
    turn = ResponseTurn(decoded, store, owner)
    request = ResponsesRequest(decoded, profile=profile, history=turn.history, stores=turn.stores)
    return request, turn


def _generators(
    request: ConversationRequest, id: str, model: str, created: int, call_ids: CallIds | None
) -> list[ChunkGenerator[Any]]:
    return [
        ResponsesRequest.chunk_generator(request, id, model, created=created, call_ids=call_ids)
    ]


RESPONSES = ProtocolCodec(
    name="responses",
    title="Responses",
    path="/v1/responses",
    parse=_parse,
    generators=_generators,
    response_type=ResponsesResponse,
    format_field="text.format",
)
