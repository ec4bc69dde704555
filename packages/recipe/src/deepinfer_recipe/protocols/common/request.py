"""A parsed request body: read it, then convert it once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from deepinfer_recipe.base.errors import RequestConsumedError
from deepinfer_recipe.conversation.policy import Policy
from deepinfer_recipe.protocols.common.body import Body
from deepinfer_recipe.protocols.common.conversation_request import ConversationRequest
from deepinfer_recipe.protocols.common.fields import ignored_fields, refuse_unserved

RequestBody: TypeAlias = bytes | str | dict[str, Any]


class _Named(Protocol):
    @property
    def model(self) -> str: ...


B = TypeVar("B", bound=_Named)


class ProtocolRequest(Generic[B]):
    """A parsed body that can be converted once; even failed conversion consumes it."""

    __slots__ = ("_body", "_policy", "fields")

    protocol: ClassVar[str]
    body_type: ClassVar[type[Body]]

    def __init__(self, body: B, fields: Mapping[str, Any], policy: Policy) -> None:
        self._body: B | None = body
        self._policy = policy
        self.fields = fields
        """The decoded body. `tools` may be None: known ones are recognised by their bytes."""

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """Names of the body that mean nothing here and were passed over (extended profile)."""
        if not self._policy.refuses_unserved_fields:
            return ()
        return ignored_fields(self.protocol, self.body_type, self.fields)

    def _peek(self) -> B:
        if self._body is None:
            raise RequestConsumedError("this request was already converted; parse the body again")
        return self._body

    def _take(self) -> B:
        body = self._peek()
        self._body = None
        if self._policy.refuses_unserved_fields:
            refuse_unserved(self.protocol, self.fields)
        return body

    @property
    def model(self) -> str:
        """The requested model name; read it before `convert` consumes the request."""
        return self._peek().model


def starts_in_reasoning(request: ConversationRequest) -> bool:
    """Whether the answer begins with thinking."""
    stage = request.parsing_options.thinking_initial_stage
    return stage is not None and stage.starts_in_reasoning()
