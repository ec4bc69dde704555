"""One request and its answers: the front door, as a server goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, cast

from deepinfer_recipe.conversation.conversation import Conversation
from deepinfer_recipe.conversation.policy import Profile
from deepinfer_recipe.prompts.encoding import encoding_for
from deepinfer_recipe.prompts.render import RenderedPrompt
from deepinfer_recipe.prompts.tokenizer import Tokenizer
from deepinfer_recipe.protocols.common.codec import ProtocolName, StoredTurn
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.generator import CallIds
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.common.request import RequestBody
from deepinfer_recipe.protocols.table import protocol_of
from deepinfer_recipe.serving.answer import Answer
from deepinfer_recipe.stores.response_store import ResponseStore

F = TypeVar("F")
Frame = Callable[[str | None, str], F]
"""Makes what is sent of an event: its name (None where the protocol has none), its data."""


def sse_frame(name: str | None, data: str) -> str:
    """A server-sent event as text."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


class Exchange(Generic[F]):
    """One request and its answers, from the HTTP body to the HTTP body.

    protocol: `chat`, `responses` or `messages`.
    body: the request body, bytes as received or a decoded object.
    id: the response id; without one, call `begin` before the first answer.
    model: model name to report; the requested one by default.
    created, call_ids: for tests, the time stamp and the source of call ids.
    store, owner: where finished Responses answers are kept, and for whom (the id of an API key,
        say); without a store `previous_response_id` is refused.
    tokenizer: decodes answers that arrive as token ids.
    frame: what is sent of an event; server-sent events as text by default.

    Raises `RequestParseError` or `ConversionError`, which `error_response` turns into a status
    and a body, and `ValueError` for a protocol or profile that is not known.
    """

    def __init__(
        self,
        protocol: ProtocolName,
        body: RequestBody,
        *,
        id: str | None = None,
        model: str | None = None,
        options: ConversionOptions | None = None,
        profile: Profile = "extended",
        created: int | None = None,
        call_ids: CallIds | None = None,
        store: ResponseStore | None = None,
        owner: str = "",
        tokenizer: Tokenizer | None = None,
        frame: Frame[F] | None = None,
    ) -> None:
        options = options or ConversionOptions()
        self._codec = protocol_of(protocol)
        self._tokenizer = tokenizer
        self._frame = frame or cast("Frame[F]", sse_frame)
        self.protocol: ProtocolName = protocol
        self.stored = False
        """Whether the finished answer is in the store."""
        self._keeps_by_itself = True
        parsed, self._stored_turn = self._codec.parse(body, profile, store, owner)
        self.model: str = model or parsed.model
        self.fields: Mapping[str, Any] = parsed.fields
        """The decoded body. `tools` may be None: known ones are recognised by their bytes."""
        self.ignored_fields: tuple[str, ...] = parsed.ignored_fields
        """Names of the body that mean nothing here and were passed over (extended profile)."""
        self.request: ConversationRequest = parsed.convert(options)
        self._encoding = encoding_for(self.request.model_version).with_special_tokens(
            options.special_tokens
        )
        self.rendered: RenderedPrompt
        self.render(self.request.conversation)
        self.id = ""
        self.answers: list[Answer[F]] = []
        """One, unless the request asked for `n` of them; empty before `begin`."""
        self._response: Any = None
        self._sends = True
        self._open = 0
        if id is not None:
            self.begin(id, created=created, call_ids=call_ids)

    def begin(
        self,
        id: str,
        *,
        created: int | None = None,
        call_ids: CallIds | None = None,
        sends: bool = True,
        accumulates: bool = True,
        keeps: bool = True,
    ) -> None:
        """Open the answers, under a response id.

        sends: whether frames are made; accumulates: whether `response` will be asked for;
        keeps: whether the finished answer goes to the store by itself, or by `keep`.
        """
        created = int(time.time()) if created is None else created
        self.id = id
        self._sends, self._keeps_by_itself = sends, keeps
        if accumulates or self.stores:
            self._response = self._codec.response_type(id, self.model, created, 0, 0)
        generators = self._codec.generators(self.request, id, self.model, created, call_ids)
        self._open = len(generators)
        self.answers = [Answer(self, generator, self._tokenizer) for generator in generators]

    def render(self, conversation: Conversation) -> bool:
        """Make `rendered` the prompt of a conversation.

        False where it leaves no room for an answer; hosts that know how long it may be override
        this.
        """
        self.rendered = self._encoding.render_conversation(conversation)
        return True

    @property
    def answer(self) -> Answer[F]:
        """The first answer; the only one unless the request asked for `n` of them."""
        return self.answers[0]

    @property
    def stream(self) -> bool:
        """Whether the client wants a stream of events."""
        return self.request.stream

    @property
    def stores(self) -> bool:
        """Whether the finished answer is to be kept."""
        return self._stored_turn is not None and self._stored_turn.stores

    @property
    def prompt(self) -> str:
        """The prompt text."""
        return self.rendered.prompt

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the prompt; what users typed never becomes a special token."""
        return tokenizer.encode_prompt(self.rendered.prompt, self.rendered.special_ranges)

    def frames(self, events: list[Any], *, is_last: bool) -> list[F]:
        """Account for events of an answer, and make of them what is sent."""
        frames: list[F] = []
        if self._response is not None:
            accumulate = self._response.accumulate
            for event in events:
                accumulate(event)
        if self._sends:
            frame, name = self._frame, self._codec.response_type.sse_event_name
            frames = [frame(name(event), event.to_json()) for event in events]
        if is_last:
            self._open -= 1
            if self._open == 0:
                done = self._codec.response_type.sse_done_data()
                if self._sends and done is not None:
                    frames.append(self._frame(None, done))
                if self._keeps_by_itself:
                    self.keep()
        return frames

    def keep(self) -> bool:
        """Put the finished answer into the store, if the client wants it kept; whether it is.

        Raises `StoreError`.
        """
        turn: StoredTurn | None = self._stored_turn
        if turn is not None and turn.stores:
            self.stored = turn.keep(self.response())
        return self.stored

    def response(self) -> dict[str, Any]:
        """The complete response; call it when all answers are finished."""
        return self._response.to_dict()

    def response_json(self) -> str:
        """The complete response as compact JSON text."""
        return self._response.to_json()
