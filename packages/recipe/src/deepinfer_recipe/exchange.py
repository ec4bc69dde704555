"""One request and its answer: the short way through the codec, as a server goes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.encoding import encoding_for
from deepinfer_recipe.inference import InferenceChunk, InferenceFinishReason, PromptUsage
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
from deepinfer_recipe.stream import StreamProcessor
from deepinfer_recipe.tokenizer import Tokenizer
from deepinfer_recipe.wire_errors import ProtocolName

FinishReason: TypeAlias = Literal["stop", "length", "content_filter"]

_REASONS: dict[FinishReason, InferenceFinishReason] = {
    "stop": InferenceFinishReason.Stop,
    "length": InferenceFinishReason.Length,
    "content_filter": InferenceFinishReason.ContentFilter,
}


class Answer:
    """One answer of an exchange under way: model text in, server-sent events out.

    Call `ready` once, `text` for every piece of output, `finish` at the end. Every call
    returns complete SSE frames, ready to send when the request asked for a stream; when it
    did not, ignore them and send `Exchange.response()` at the end.
    """

    __slots__ = ("_exchange", "_processor")

    def __init__(self, exchange: Exchange, processor: StreamProcessor[Any]) -> None:
        self._exchange = exchange
        self._processor = processor

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; true early when a stop sequence matched."""
        return self._processor.finished

    @property
    def tool_call_repairs(self) -> list[str]:
        """What had to be mended in malformed tool calls, in order."""
        return self._processor.tool_call_repairs

    def ready(
        self, *, prompt_tokens: int, cached_tokens: int = 0, fingerprint: str | None = None
    ) -> list[str]:
        """The prompt is in: what it cost, and how much of it the cache held."""
        usage = PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        return self._push(InferenceChunk.ready(prompt_usage=usage, system_fingerprint=fingerprint))

    def text(self, text: str, tokens: int = 1) -> list[str]:
        """The next piece of output and the number of tokens it took.

        Output behind a matched stop sequence is ignored; stop the backend when `finished`.
        """
        if self._processor.finished:
            return []
        return self._push(InferenceChunk.text(text, tokens))

    def finish(self, reason: FinishReason = "stop") -> list[str]:
        """The backend is done; nothing happens if a stop sequence already ended the answer."""
        if self._processor.finished:
            return []
        return self._push(InferenceChunk.finish(_REASONS[reason]))

    def _push(self, chunk: InferenceChunk) -> list[str]:
        return self._exchange.frames(self._processor.push(chunk), is_last=self._processor.finished)


class Exchange:
    """One request and its answers, from the HTTP body to the HTTP body.

    protocol: `chat`, `responses` or `messages`.
    body: the request body, bytes as received or a decoded object.
    id: the response id.
    model: model name to report; the requested one by default.
    created, call_ids: for tests, the time stamp and the source of call ids.

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
    ) -> None:
        options = options or ConversionOptions()
        created = int(time.time()) if created is None else created
        self.protocol: ProtocolName = protocol
        self.id = id
        processors: list[StreamProcessor[Any]]
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
            responses = ResponsesRequest(body, profile=profile)
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
        processors = [StreamProcessor(g, converted.parsing_options) for g in generators]
        self.request: ConversationRequest = converted
        self._encoding = encoding_for(converted.model_version).with_special_tokens(
            options.special_tokens
        )
        self.rendered: RenderedPrompt = self._encoding.render_conversation(converted.conversation)
        self._accumulate: Callable[[Any], None] = response.accumulate
        self._response = response
        self._open = len(processors)
        self.answers: list[Answer] = [Answer(self, processor) for processor in processors]

    @property
    def answer(self) -> Answer:
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
        return frames

    def response(self) -> dict[str, Any]:
        """The complete response; call it when all answers are finished."""
        return self._response.to_dict()
