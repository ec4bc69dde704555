"""Chat Completions requests, and the protocol as one value."""

from __future__ import annotations

from typing import Any

from deepinfer_recipe.conversation.policy import Profile, policy_of
from deepinfer_recipe.protocols.chat import convert
from deepinfer_recipe.protocols.chat.body import ChatBody
from deepinfer_recipe.protocols.chat.events import (
    ChatCompletionChunkGenerator,
    ChatCompletionResponse,
    UsageLedger,
)
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
from deepinfer_recipe.stores.response_store import ResponseStore


class ChatCompletionRequest(ProtocolRequest[ChatBody]):
    """A Chat Completions request; even failed conversion consumes it.

    `body` is the JSON text or the decoded object. Raises `RequestParseError` (a `ValueError`)
    for invalid JSON or a field of the wrong shape.
    """

    __slots__ = ()

    protocol = "chat"
    body_type = ChatBody

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        policy = policy_of(profile)
        parsed, fields = parse_request(ChatBody, body)
        convert.check_profile(parsed, policy)
        super().__init__(parsed, fields, policy)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return convert.convert(self._take(), options, self._policy)

    @staticmethod
    def chunk_generator(
        request: ConversationRequest,
        id: str,
        model: str,
        *,
        index: int = 0,
        ledger: UsageLedger | None = None,
        created: int | None = None,
        call_ids: CallIds | None = None,
    ) -> ChatCompletionChunkGenerator:
        """The generator of the answer to a converted request.

        Of several answers to one request, `index` tells which this is; they share a `ledger`.
        """
        return ChatCompletionChunkGenerator(
            id,
            model,
            thinking_mode=request.conversation.thinking_mode,
            starts_in_reasoning=starts_in_reasoning(request),
            # The reference streams inside even what is not streamed, with usage.
            include_usage=request.include_usage
            or (request.policy.reports_usage_unasked and not request.stream),
            policy=request.policy,
            index=index,
            ledger=ledger,
            created=created,
            call_ids=call_ids,
        )


def _parse(
    body: RequestBody, profile: Profile, store: ResponseStore | None, owner: str
) -> tuple[ParsedRequest, None]:
    return ChatCompletionRequest(body, profile=profile), None


def _generators(
    request: ConversationRequest, id: str, model: str, created: int, call_ids: CallIds | None
) -> list[ChunkGenerator[Any]]:
    count = request.inference_options.n
    ledger = UsageLedger(count)
    return [
        ChatCompletionRequest.chunk_generator(
            request, id, model, index=index, ledger=ledger, created=created, call_ids=call_ids
        )
        for index in range(count)
    ]


CHAT = ProtocolCodec(
    name="chat",
    title="Chat Completions",
    path="/v1/chat/completions",
    parse=_parse,
    generators=_generators,
    response_type=ChatCompletionResponse,
    format_field="response_format",
)
