"""The parts behind the routes, and what is known about one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_search_fetch.client import AsyncSearchFetch
from deepinfer_search_fetch.errors import LimitError, RefusedError
from deepinfer_search_fetch.service.auth import ANONYMOUS, ApiKey, KeyStore
from deepinfer_search_fetch.service.idempotency import Replays
from deepinfer_search_fetch.service.metering import Charge, Ledger
from deepinfer_search_fetch.service.metrics import Metrics
from deepinfer_search_fetch.service.ratelimit import RateLimiter
from deepinfer_search_fetch.service.settings import ServiceSettings

CALL = "search_fetch.call"


@dataclass(slots=True)
class Call:
    """One HTTP request. headers: of the answer; charges: due with the body bytes sent next.

    key: the caller's; key_id is "-" until he is known.
    """

    request_id: str
    started: float
    key: ApiKey | None = None
    key_id: str = "-"
    monthly_quota: int | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])
    charges: list[Charge] = field(default_factory=list[Charge])
    status: int = 0


def call_of(scope: Mapping[str, Any]) -> Call:
    """The call of an ASGI scope that passed `Delivery`."""
    call: Call = scope[CALL]
    return call


@dataclass(slots=True)
class Service:
    """What the routes work with. keys: None lets everyone in (loopback only)."""

    client: AsyncSearchFetch
    ledger: Ledger
    keys: KeyStore | None
    settings: ServiceSettings
    limiter: RateLimiter
    metrics: Metrics
    replays: Replays

    def identify(self, call: Call, headers: Mapping[str, str]) -> None:
        """Find out who calls. Raises RefusedError(unauthorized)."""
        key = ANONYMOUS
        if self.keys is not None:
            header = headers.get("authorization", "")
            bearer = header[7:].strip() if header[:7].lower() == "bearer " else ""
            secret = bearer or headers.get("x-api-key", "")
            if not secret:
                raise RefusedError(
                    "unauthorized", "send the key as 'Authorization: Bearer sk-…' or 'x-api-key'"
                )
            key = self.keys.find(secret)
        call.key, call.key_id, call.monthly_quota = key, key.id, key.monthly_quota

    def take_token(self, call: Call) -> None:
        """Take one of the caller's rate tokens; sets the rate headers. Raises LimitError."""
        standing = self.limiter.take(call.key_id)
        call.headers.update(standing.headers)
        standing.check()

    def authorise(self, call: Call, headers: Mapping[str, str], scope: str | None) -> ApiKey:
        """The caller's key, after scope and quota checks.

        scope: None for any live key, whatever is left of its quota.
        """
        key = call.key
        if key is None:
            raise RefusedError("unauthorized", "this route needs a key")
        if scope is not None:
            key.require(scope)
        if scope is not None and "idempotency-key" not in headers:
            self.check_quota(call)  # a repeated call may ask for an answer that is paid already
        return key

    def check_quota(self, call: Call) -> None:
        """Refuse work whose answer could not be billed. Raises LimitError(insufficient_quota)."""
        quota = call.monthly_quota
        if quota is not None and self.ledger.month_quantity(call.key_id) >= quota:
            raise LimitError("insufficient_quota", "this key's monthly quota is used up")

    def owe(self, call: Call, charge: Charge) -> None:
        """Have `charge` settled with the next bytes of this call's answer.

        Raises LimitError(insufficient_quota) when other answers on their way took the last of it.
        """
        quota = None if self.ledger.has(charge.request_id) else call.monthly_quota
        self.ledger.reserve(charge.key_id, charge.quantity, quota)
        call.charges.append(charge)
