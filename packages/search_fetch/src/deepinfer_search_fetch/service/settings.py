"""What the operator of the service decides: prices, limits, times. Read once from a TOML file."""

from __future__ import annotations

import itertools
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepinfer_search_fetch.errors import InvalidRequestError

SETTINGS_FILE = "service.toml"


_SECONDS = re.compile(r"[0-9]{1,11}(\.[0-9]{1,6})?")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def parse_moment(value: Any) -> datetime:
    """A UTC moment from an RFC 3339 date or date-time, or seconds since 1970.

    A date is its first instant in UTC; a date-time without a zone is refused. Raises ValueError.
    """
    if isinstance(value, datetime):
        moment = value
    elif _SECONDS.fullmatch(str(value)):
        return datetime.fromtimestamp(float(str(value)), UTC)
    elif _DAY.fullmatch(str(value)):
        return datetime.fromisoformat(f"{value}T00:00:00+00:00")
    else:
        moment = datetime.fromisoformat(str(value))
    if moment.tzinfo is None:
        raise ValueError("a date-time needs a zone, such as 2026-11-01T00:00:00Z")
    return moment.astimezone(UTC)


class Price(BaseModel):
    """What one billable call costs from a moment on, in millionths of the currency unit.

    effective: when the price begins (UTC); micros_per_call 0 makes a free period, whose calls are
    recorded at price 0. endpoint: None for both.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    effective: Annotated[datetime, BeforeValidator(parse_moment)]
    micros_per_call: int = Field(ge=0, strict=True)
    currency: str = Field(default="CNY", pattern=r"^[A-Z]{3}$")
    endpoint: str | None = Field(default=None, pattern=r"^(search|fetch)$")


# 5.00 CNY per 1,000 successful calls.
DEFAULT_PRICES = (Price(effective=datetime(1970, 1, 1, tzinfo=UTC), micros_per_call=5_000),)


class ServiceSettings(BaseModel):
    """Settings of the REST service. Nothing here can be changed by a request.

    bill_cache_hits: whether a Fetch answered from the cache is billable.
    rate_per_second, rate_burst: token bucket of each key; max_concurrent: requests at work at once,
    max_concurrent_per_key: of one key. header_seconds, body_seconds: time a client may take to send
    the head and the body of a request; answer_seconds: for which it may take none of the answer;
    max_connections: open at once; connections_per_second: new ones of one address (behind a proxy
    that is everyone's), beyond which they wait up to two seconds and are then refused.
    shutdown_seconds: time for running requests after SIGTERM; the rest gets a 503.
    public_hosts: host names clients reach the service by, for MCP's Host and Origin check.
    cors_origins: origins whose pages may call the service from a browser ("https://app.example").
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prices: tuple[Price, ...] = DEFAULT_PRICES
    bill_cache_hits: bool = True
    rate_per_second: float = Field(default=10.0, gt=0)
    rate_burst: int = Field(default=20, ge=1)
    max_concurrent: int = Field(default=64, ge=1)
    max_concurrent_per_key: int = Field(default=16, ge=1)
    max_connections: int = Field(default=1024, ge=1)
    connections_per_second: float = Field(default=50.0, gt=0)
    max_body_bytes: int = Field(default=1024 * 1024, ge=1024)
    header_seconds: float = Field(default=10.0, gt=0)
    body_seconds: float = Field(default=15.0, gt=0)
    answer_seconds: float = Field(default=60.0, gt=0)
    shutdown_seconds: int = Field(default=30, ge=0)
    public_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _prices_are_in_order(self) -> ServiceSettings:
        for endpoint in ("search", "fetch"):
            starts = [p.effective for p in self.prices if p.endpoint in (None, endpoint)]
            if any(a >= b for a, b in itertools.pairwise(starts)):
                raise ValueError(f"prices of {endpoint} must have rising effective dates")
        return self

    @classmethod
    def from_file(cls, file: Path) -> ServiceSettings:
        """Settings of a TOML file. Raises InvalidRequestError naming the file and the field."""
        try:
            values = tomllib.loads(file.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise InvalidRequestError("invalid_argument", f"{file}: {error}") from None
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(p) for p in first["loc"]) or "settings"
            raise InvalidRequestError(
                "invalid_argument", f"{file}: {field}: {first['msg']}"
            ) from None


def price_at(prices: tuple[Price, ...], endpoint: str, timestamp: float) -> tuple[int, str]:
    """(micro-units of one call, currency) at a time; before the first price a call costs 0."""
    valid = [
        p for p in prices if p.endpoint in (None, endpoint) and p.effective.timestamp() <= timestamp
    ]
    if valid:
        return valid[-1].micros_per_call, valid[-1].currency
    return 0, prices[0].currency if prices else "CNY"
