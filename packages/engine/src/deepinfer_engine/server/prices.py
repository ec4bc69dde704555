"""What tokens cost: a dated table, exact to the last digit.

Amounts are whole picos, millionths of a millionth of the currency's unit: a price of up to six
decimals for a million tokens is a whole number of them for one token, so sums never round.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from deepinfer_engine.errors import ConfigError

PICOS = 10**12
"""Of one unit of the currency, such as a dollar."""
PUBLISHED = "published"
"""The name of the table that is shipped."""

Period = Literal["peak", "off_peak"]
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MAX_PRICE = Decimal(1_000_000)


def _picos(value: object) -> int:
    """A price for a million tokens as picos for one."""
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise ValueError("wanted a number, a price for a million tokens")  # noqa: TRY004
    price = Decimal(value)
    if not price.is_finite() or not 0 <= price <= _MAX_PRICE:
        raise ValueError(f"wanted a price from 0 to {_MAX_PRICE}, got {value}")
    picos = price * 10**6
    if picos != int(picos):
        raise ValueError(f"wanted at most six decimals, got {value}")
    return int(picos)


_Price = Annotated[int, BeforeValidator(_picos)]


class Rates(BaseModel):
    """Picos for one token: of the prompt, found in the cache or not, and of the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hit: _Price
    miss: _Price
    output: _Price


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(min_length=1)
    since: AwareDatetime
    off_peak: Rates
    peak: Rates | None = None


def _span(text: object) -> tuple[int, int]:
    """`HH:MM-HH:MM` as minutes of the day, the end excluded."""
    try:
        begin, end = (_minutes(part) for part in str(text).split("-"))
    except ValueError:
        raise ValueError(f"wanted hours as 01:00-04:00, got {text!r}") from None
    if not begin < end:
        raise ValueError(f"{text}: the end must be later than the beginning, on the same day")
    return begin, end


def _minutes(text: str) -> int:
    hour, minute = (int(part) for part in text.split(":"))
    if not (0 <= hour <= 24 and 0 <= minute < 60 and hour * 60 + minute <= 24 * 60):
        raise ValueError(text)
    return hour * 60 + minute


class _Peak(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    hours: tuple[Annotated[tuple[int, int], BeforeValidator(_span)], ...] = ()
    days: tuple[Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"], ...] = _DAYS
    holidays: tuple[dt.date, ...] = ()

    def holds(self, moment: dt.datetime) -> bool:
        minute = moment.hour * 60 + moment.minute
        return (
            _DAYS[moment.weekday()] in self.days
            and moment.date() not in self.holidays
            and any(begin <= minute < end for begin, end in self.hours)
        )


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: str = Field(pattern="^[A-Z]{3}$")
    price: tuple[_Entry, ...] = Field(min_length=1)
    peak: _Peak = _Peak()

    @model_validator(mode="after")
    def _check(self) -> _Table:
        seen: set[tuple[str, dt.datetime]] = set()
        for entry in self.price:
            for model in entry.models:
                if (model, entry.since) in seen:
                    raise ValueError(f"{model} has two prices since {entry.since}")
                seen.add((model, entry.since))
            if entry.peak is not None and not self.peak.hours:
                raise ValueError(
                    f"{entry.models[0]} has a peak price, and no [peak] hours say when"
                )
        return self


@dataclass(frozen=True, slots=True)
class Tariff:
    """What one request costs by: the rates of its model at its time. Currency: three letters."""

    rates: Rates
    period: Period
    currency: str

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Picos. `cached_tokens` are part of `prompt_tokens`."""
        rates = self.rates
        missed = prompt_tokens - cached_tokens
        return cached_tokens * rates.hit + missed * rates.miss + output_tokens * rates.output


class PriceList:
    """A table, and under which name of it this server's answers are priced."""

    def __init__(self, table: _Table, priced_as: str) -> None:
        self._peak = table.peak
        self.currency = table.currency
        self.priced_as = priced_as
        chosen = [e for e in table.price if priced_as in e.models] or [
            e for e in table.price if "*" in e.models
        ]
        if not chosen:
            known = sorted({model for entry in table.price for model in entry.models})
            raise ConfigError(
                f"prices: {priced_as!r} is not in the table; name one of {', '.join(known)} with "
                "--priced-as"
            )
        self._entries: Sequence[_Entry] = sorted(chosen, key=lambda e: e.since, reverse=True)

    def at(self, seconds: float) -> Tariff:
        """The tariff of a request that came then (seconds since 1970). Before the first date of
        the table its first price counts."""
        moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
        entry = next((e for e in self._entries if e.since <= moment), self._entries[-1])
        if entry.peak is not None and self._peak.holds(moment):
            return Tariff(entry.peak, "peak", self.currency)
        return Tariff(entry.off_peak, "off_peak", self.currency)


def read_prices(where: str, priced_as: str) -> PriceList:
    """The table `published` or of a TOML file. Raises ConfigError naming file and field."""
    if where == PUBLISHED:
        text = files("deepinfer_engine.server").joinpath("prices.toml").read_text("utf-8")
    else:
        try:
            text = Path(where).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"prices: cannot read {where}: {exc}") from exc
    try:
        # Decimals as they are written: 0.15 is no binary fraction.
        table = _Table.model_validate(tomllib.loads(text, parse_float=Decimal))
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"prices: {where} is not TOML: {exc}") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"])) or "table"
        raise ConfigError(f"prices: {where}, {name}: {first['msg']}") from exc
    return PriceList(table, priced_as)


def spelled(picos: int) -> str:
    """An amount in units of the currency, all of its digits: `0.00001234`."""
    sign, picos = ("-", -picos) if picos < 0 else ("", picos)
    whole, rest = divmod(picos, PICOS)
    digits = f"{rest:012d}".rstrip("0")
    return f"{sign}{whole}.{digits.ljust(2, '0')}"
