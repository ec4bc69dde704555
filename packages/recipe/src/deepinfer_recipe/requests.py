"""Protocol requests: parse a body, convert it once, make the generator of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.errors import RequestConsumedError
from deepinfer_recipe.json_text import load_body
from deepinfer_recipe.options import ConversionOptions, Profile
from deepinfer_recipe.protocols import chat_convert, messages_convert, responses_convert
from deepinfer_recipe.protocols.body import parse_body
from deepinfer_recipe.protocols.chat_body import ChatBody
from deepinfer_recipe.protocols.chat_events import ChatCompletionChunkGenerator, UsageLedger
from deepinfer_recipe.protocols.draft import resolve_model
from deepinfer_recipe.protocols.generator import CallIds
from deepinfer_recipe.protocols.messages_body import MessagesBody
from deepinfer_recipe.protocols.messages_events import MessagesChunkGenerator
from deepinfer_recipe.protocols.responses_body import (
    CustomTool,
    ResponsesBody,
    parse_items,
    parse_tools,
)
from deepinfer_recipe.protocols.responses_echo import ResponsesEcho
from deepinfer_recipe.protocols.responses_events import ResponsesChunkGenerator, Seal
from deepinfer_recipe.protocols.responses_items import ParsedResponses
from deepinfer_recipe.protocols.responses_tools import namespace_map
from deepinfer_recipe.protocols.tool_lists import parse_request
from deepinfer_recipe.response_history import message_item

RequestBody: TypeAlias = bytes | str | dict[str, Any]


class _Named(Protocol):
    @property
    def model(self) -> str: ...


B = TypeVar("B", bound=_Named)


class _Request(Generic[B]):
    """A parsed body that can be converted once; even failed conversion consumes it."""

    __slots__ = ("_body", "_profile")

    def __init__(self, body: B, profile: Profile) -> None:
        self._body: B | None = body
        self._profile: Profile = profile

    def _peek(self) -> B:
        if self._body is None:
            raise RequestConsumedError("this request was already converted; parse the body again")
        return self._body

    def _take(self) -> B:
        body = self._peek()
        self._body = None
        return body

    @property
    def model(self) -> str:
        """The requested model name; read it before `convert` consumes the request."""
        return self._peek().model


def _starts_in_reasoning(request: ConversationRequest) -> bool:
    stage = request.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()


class ChatCompletionRequest(_Request[ChatBody]):
    """A Chat Completions request; even failed conversion consumes it.

    `body` is the JSON text or the decoded object. Raises `RequestParseError` (a `ValueError`)
    for invalid JSON or a field of the wrong shape.
    """

    __slots__ = ()

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        parsed = parse_request(ChatBody, body)
        chat_convert.check_profile(parsed, profile)
        super().__init__(parsed, profile)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return chat_convert.convert(self._take(), options, self._profile)

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
            starts_in_reasoning=_starts_in_reasoning(request),
            # The reference streams inside even what is not streamed, with usage.
            include_usage=request.include_usage
            or (request.profile == "parity" and not request.stream),
            profile=request.profile,
            index=index,
            ledger=ledger,
            created=created,
            call_ids=call_ids,
        )


class MessagesRequest(_Request[MessagesBody]):
    """A Messages request; even failed conversion consumes it. Errors as in Chat Completions."""

    __slots__ = ()

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        super().__init__(parse_request(MessagesBody, body), profile)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return messages_convert.convert(self._take(), options, self._profile)

    @staticmethod
    def chunk_generator(
        request: ConversationRequest, id: str, model: str, *, call_ids: CallIds | None = None
    ) -> MessagesChunkGenerator:
        """The generator of the answer to a converted request."""
        return MessagesChunkGenerator(id, model, _starts_in_reasoning(request), call_ids=call_ids)


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


class ResponsesRequest(_Request[ParsedResponses]):
    """A Responses request; even failed conversion consumes it. Errors as in Chat Completions."""

    __slots__ = ()

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
        """
        parsed = parse_body(ResponsesBody, load_body(body))
        responses_convert.check_profile(parsed, profile)
        given = parsed.input
        if history is not None:
            own = [message_item(given)] if isinstance(given, str) else given or []
            given = [*history, *own]
        items = parse_items(given, len(history or ())) if isinstance(given, list) else None
        tools = parse_tools(parsed.tools or [])
        continues = history is not None
        super().__init__(ParsedResponses(parsed, items, tools, continues, stores), profile)

    def namespace_tool_map(self, options: ConversionOptions) -> dict[str, tuple[str, str]]:
        """Return the function names of the declared namespace tools.

        Each function name maps to `(namespace, local name)`; read them before `convert`
        consumes this request. Raises `ConversionError` for an invalid tool declaration.
        """
        parsed = self._peek()
        version = resolve_model(parsed.model, options, self._profile)
        return namespace_map(parsed.tools, version.prompt_format)

    def echo(self) -> ResponsesEcho:
        """Return the request settings that responses report; read them before `convert`."""
        parsed = self._peek()
        return ResponsesEcho.of(parsed.body, parsed.tools)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        parsed = self._take()
        request = responses_convert.convert(parsed, options, self._profile)
        custom = tuple(tool.name for _, tool in parsed.tools if isinstance(tool, CustomTool))
        namespaces = namespace_map(parsed.tools, request.model_version.prompt_format)
        echo = ResponsesEcho.of(parsed.body, parsed.tools)
        if self._profile == "extended":
            echo = echo.of_stored(parsed.body, stores=parsed.stores)
        settings = _ResponsesSettings(
            echo,
            namespaces,
            custom,
            _seal(parsed.body, options) if self._profile == "extended" else None,
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
            thinking_mode=_starts_in_reasoning(request),
            profile=request.profile,
            created=created,
            call_ids=call_ids,
        )
