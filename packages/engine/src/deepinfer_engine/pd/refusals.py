"""How a worker says that it can never serve a request."""

from __future__ import annotations

from deepinfer_engine.errors import (
    CapacityError,
    ConstraintError,
    ConstraintsUnavailable,
    PromptTooLong,
    RequestError,
    SchemaTooComplex,
)
from deepinfer_engine.pd.peers import abort_body
from deepinfer_engine.pd.wire import Body, Xid

# First match wins, so subclasses stand before their bases.
_REFUSALS: tuple[tuple[type[RequestError], str], ...] = (
    (CapacityError, "capacity"),
    (SchemaTooComplex, "too_complex"),
    (ConstraintError, "constraint"),
    (ConstraintsUnavailable, "unenforceable"),
    (RequestError, "request"),
)


def refusal(xid: Xid, error: RequestError) -> Body:
    """The ABORT for a request that this worker can never serve."""
    if isinstance(error, PromptTooLong):
        numbers = {"prompt_tokens": error.prompt_tokens, "max_tokens": error.max_tokens}
        return {**abort_body(xid, "too_long", str(error)), **numbers}
    reason = next(word for kind, word in _REFUSALS if isinstance(error, kind))
    body = abort_body(xid, reason, str(error))
    return {**body, "param": error.param} if isinstance(error, ConstraintError) else body
