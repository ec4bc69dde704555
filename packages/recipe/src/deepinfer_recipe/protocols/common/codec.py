"""What a protocol is to the rest of the package: one value, looked up in `protocols.table`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from deepinfer_recipe.conversation.policy import Profile
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.generator import CallIds, ChunkGenerator
from deepinfer_recipe.protocols.common.options import ConversionOptions
from deepinfer_recipe.protocols.common.request import RequestBody
from deepinfer_recipe.stores.response_store import ResponseStore

ProtocolName: TypeAlias = Literal["chat", "responses", "messages"]


class ParsedRequest(Protocol):
    """A request object of one protocol."""

    @property
    def model(self) -> str:
        """The requested model name."""
        ...

    @property
    def fields(self) -> Mapping[str, Any]:
        """The decoded body."""
        ...

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the body that mean nothing here and were passed over."""
        ...

    def convert(self, options: ConversionOptions) -> ConversationRequest:
        """Convert, once. Raises `ConversionError`."""
        ...


class StoredTurn(Protocol):
    """Keeps the finished answer of a request in a store."""

    @property
    def stores(self) -> bool:
        """Whether the client wants the answer kept."""
        ...

    def keep(self, response: Mapping[str, Any]) -> bool:
        """Keep the finished answer; whether it is kept."""
        ...


Parse: TypeAlias = Callable[
    [RequestBody, Profile, ResponseStore | None, str], tuple[ParsedRequest, StoredTurn | None]
]
"""`(body, profile, store, owner)` to the request, and what keeps its answer."""
MakeGenerators: TypeAlias = Callable[
    [ConversationRequest, str, str, int, CallIds | None], list[ChunkGenerator[Any]]
]
"""`(request, id, model, created, call_ids)` to the generators of its answers."""


@dataclass(frozen=True, slots=True)
class ProtocolCodec:
    """One protocol.

    response_type: accumulates events to a complete response; `(id, model, created,
        prompt_tokens, cached_tokens)`.
    format_field: where its bodies ask for a format of the answer.
    error_style: the shape of its error bodies.
    """

    name: ProtocolName
    title: str
    path: str
    parse: Parse
    generators: MakeGenerators
    response_type: Any
    format_field: str
    error_style: Literal["openai", "anthropic"] = "openai"
