"""One request and its answer: the short way through the codec, as a server goes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepinfer_recipe.answer import Answer
from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.encoding import encoding_for
from deepinfer_recipe.json_text import load_body
from deepinfer_recipe.options import ConversionOptions, Profile
from deepinfer_recipe.protocols.chat_events import ChatCompletionResponse, UsageLedger
from deepinfer_recipe.protocols.generator import CallIds
from deepinfer_recipe.protocols.messages_events import MessagesResponse
from deepinfer_recipe.protocols.responses_events import ResponsesResponse
from deepinfer_recipe.render import RenderedPrompt
from deepinfer_recipe.requests import (
    ChatCompletionRequest,
    MessagesRequest,
    RequestBody,
    ResponsesRequest,
)
from deepinfer_recipe.response_history import ResponseTurn
from deepinfer_recipe.response_store import ResponseStore
from deepinfer_recipe.tokenizer import Tokenizer
from deepinfer_recipe.wire_errors import ProtocolName


class Exchange:
    """One request and its answers, from the HTTP body to the HTTP body.

    protocol: `chat`, `responses` or `messages`.
    body: the request body, bytes as received or a decoded object.
    id: the response id.
    model: model name to report; the requested one by default.
    created, call_ids: for tests, the time stamp and the source of call ids.
    store, owner: where finished Responses answers are kept, and for whom (the id of an API key,
        say); without a store `previous_response_id` is refused.

    Raises `RequestParseError` or `ConversionError`; `wire_errors.error_response` turns both
    into a status and a body.
    """

    def __init__(
        self,
        protocol: ProtocolName,
        body: RequestBody,
        *,
        id: str,
        model: str | None = None,
        options: ConversionOptions | None = None,
        profile: Profile = "extended",
        created: int | None = None,
        call_ids: CallIds | None = None,
        store: ResponseStore | None = None,
        owner: str = "",
    ) -> None:
        options = options or ConversionOptions()
        created = int(time.time()) if created is None else created
        self.protocol: ProtocolName = protocol
        self.id = id
        self.stored = False
        """Whether the finished answer is in the store."""
        self._stored_turn: ResponseTurn | None = None
        response: Any
        if protocol == "chat":
            request = ChatCompletionRequest(body, profile=profile)
            self.model = model or request.model
            converted = request.convert(options)
            count = converted.inference_options.n
            ledger = UsageLedger(count)
            generators: list[Any] = [
                ChatCompletionRequest.chunk_generator(
                    converted,
                    id,
                    self.model,
                    index=index,
                    ledger=ledger,
                    created=created,
                    call_ids=call_ids,
                )
                for index in range(count)
            ]
            response = ChatCompletionResponse(id, self.model, created, 0, 0)
        elif protocol == "responses":
            responses = self._responses_request(body, profile, store, owner)
            self.model = model or responses.model
            converted = responses.convert(options)
            generators = [
                ResponsesRequest.chunk_generator(
                    converted, id, self.model, created=created, call_ids=call_ids
                )
            ]
            response = ResponsesResponse(id, self.model, created, 0, 0)
        else:
            messages = MessagesRequest(body, profile=profile)
            self.model = model or messages.model
            converted = messages.convert(options)
            generators = [
                MessagesRequest.chunk_generator(converted, id, self.model, call_ids=call_ids)
            ]
            response = MessagesResponse(id, self.model, created, 0, 0)
        self.request: ConversationRequest = converted
        self._encoding = encoding_for(converted.model_version).with_special_tokens(
            options.special_tokens
        )
        self.rendered: RenderedPrompt
        self.render(converted.conversation)
        self._accumulate: Callable[[Any], None] = response.accumulate
        self._response = response
        self._open = len(generators)
        self.answers: list[Answer[str]] = [Answer(self, generator) for generator in generators]

    def _responses_request(
        self, body: RequestBody, profile: Profile, store: ResponseStore | None, owner: str
    ) -> ResponsesRequest:
        if store is None or profile == "parity":
            return ResponsesRequest(body, profile=profile)
        decoded = load_body(body)
        if not isinstance(decoded, dict):
            return ResponsesRequest(body, profile=profile)
        self._stored_turn = turn = ResponseTurn(decoded, store, owner)
        return ResponsesRequest(decoded, profile=profile, history=turn.history, stores=turn.stores)

    def render(self, conversation: Conversation) -> bool:
        """Make `rendered` the prompt of a conversation. True: how long it may be, others know."""
        self.rendered = self._encoding.render_conversation(conversation)
        return True

    @property
    def answer(self) -> Answer[str]:
        """The first answer; the only one unless the request asked for `n` of them."""
        return self.answers[0]

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream of events."""
        return self.request.stream

    @property
    def prompt(self) -> str:
        """The prompt text."""
        return self.rendered.prompt

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt; what users typed never becomes a special token."""
        return tokenizer.encode_prompt(self.rendered.prompt, self.rendered.special_ranges)

    def frames(self, events: list[Any], *, is_last: bool) -> list[str]:
        """Account for events of an answer and turn them into SSE frames."""
        frames: list[str] = []
        response = self._response
        for event in events:
            self._accumulate(event)
            name = response.sse_event_name(event)
            data = event.to_json()
            frames.append(
                f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"
            )
        if is_last:
            self._open -= 1
            done = response.sse_done_data()
            if self._open == 0 and done is not None:
                frames.append(f"data: {done}\n\n")
            if self._open == 0 and self._stored_turn is not None:
                self.stored = self._stored_turn.keep(self.response())
        return frames

    def response(self) -> dict[str, Any]:
        """The complete response; call it when all answers are finished."""
        return self._response.to_dict()
