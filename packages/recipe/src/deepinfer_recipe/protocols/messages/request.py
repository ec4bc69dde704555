"""Messages requests, and the protocol as one value."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.conversation.policy import Profile, policy_of
from deepinfer_recipe.protocols.common.codec import ParsedRequest, ProtocolCodec
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.common.request import (
    ProtocolRequest,
    RequestBody,
    starts_in_reasoning,
)
from deepinfer_recipe.protocols.common.tool_lists import parse_request
from deepinfer_recipe.protocols.messages import convert
from deepinfer_recipe.protocols.messages.body import MessagesBody
from deepinfer_recipe.protocols.messages.events import MessagesChunkGenerator, MessagesResponse
from deepinfer_recipe.stores.response_store import ResponseStore


class MessagesRequest(ProtocolRequest[MessagesBody]):
    """A Messages request; even failed conversion consumes it. Errors as in Chat Completions."""

    __slots__ = ()

    protocol = "messages"
    body_type = MessagesBody

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        policy = policy_of(profile)
        parsed, fields = parse_request(MessagesBody, body)
        convert.check_profile(parsed, policy)
        super().__init__(parsed, fields, policy)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return convert.convert(self._take(), options, self._policy)

    @staticmethod
    def chunk_generator(
        request: ConversationRequest, id: str, model: str, *, call_ids: CallIds | None = None
    ) -> MessagesChunkGenerator:
        """The generator of the answer to a converted request."""
        return MessagesChunkGenerator(id, model, starts_in_reasoning(request), call_ids=call_ids)


def _parse(
    body: RequestBody, profile: Profile, store: ResponseStore | None, owner: str
) -> tuple[ParsedRequest, None]:
    return MessagesRequest(body, profile=profile), None


def _generators(
    request: ConversationRequest, id: str, model: str, created: int, call_ids: CallIds | None
) -> list[ChunkGenerator[Any]]:
    return [MessagesRequest.chunk_generator(request, id, model, call_ids=call_ids)]


MESSAGES = ProtocolCodec(
    name="messages",
    title="Messages",
    path="/v1/messages",
    parse=_parse,
    generators=_generators,
    response_type=MessagesResponse,
    format_field="output_config.format",
    error_style="anthropic",
)
