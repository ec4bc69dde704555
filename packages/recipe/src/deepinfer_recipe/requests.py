"""Protocol requests: parse a body, convert it once, make the generator of its answer."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from deepinfer_recipe.conversation_request import ConversationRequest
from deepinfer_recipe.errors import RequestConsumedError
from deepinfer_recipe.json_text import load_body
from deepinfer_recipe.options import ConversionOptions, Profile
from deepinfer_recipe.protocols import chat_convert, messages_convert
from deepinfer_recipe.protocols.body import parse_body
from deepinfer_recipe.protocols.chat_body import ChatBody
from deepinfer_recipe.protocols.messages_body import MessagesBody

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


class ChatCompletionRequest(_Request[ChatBody]):
    """A Chat Completions request; even failed conversion consumes it.

    `body` is the JSON text or the decoded object. Raises `RequestParseError` (a `ValueError`)
    for invalid JSON or a field of the wrong shape.
    """

    __slots__ = ()

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        parsed = parse_body(ChatBody, load_body(body))
        chat_convert.check_profile(parsed, profile)
        super().__init__(parsed, profile)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return chat_convert.convert(self._take(), options, self._profile)


class MessagesRequest(_Request[MessagesBody]):
    """A Messages request; even failed conversion consumes it. Errors as in Chat Completions."""

    __slots__ = ()

    def __init__(self, body: RequestBody, *, profile: Profile = "parity") -> None:
        super().__init__(parse_body(MessagesBody, load_body(body)), profile)

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError` with the HTTP status and body."""
        return messages_convert.convert(self._take(), options, self._profile)
