"""What an answer used, as its client is told it, what that costs, and its row in the ledger."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_engine.codec.errors import Protocol
from deepinfer_engine.codec.protocol import WireEvent
from deepinfer_engine.core.types import Usage
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.ledger import Charge, Ledger
from deepinfer_engine.server.prices import PriceList, read_prices, spelled
from deepinfer_engine.settings import Settings


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that is about to end. `counted`: what the engine counted, for an answer whose
    protocol tells its client nothing."""

    id: str
    at: float
    key: str
    protocol: Protocol
    model: str
    finish: str
    counted: Usage


@dataclass(slots=True)
class Billing:
    """Prices answers and writes them down; either may be left out."""

    prices: PriceList | None
    ledger: Ledger | None
    wall: Callable[[], float]

    def charge(self, answered: Answered, batch: list[WireEvent], body: str | None) -> Charge:
        """The row of an answer, by the usage that goes to its client.

        batch: the events that end a stream; body: the whole answer where there is no stream.
        """
        told = _last_usage(batch) if body is None else _usage_in(body)
        prompt, cached, output = (
            _of_engine(answered.counted) if told is None else _of_wire(answered.protocol, told)
        )
        row = Charge(
            id=answered.id,
            at=answered.at,
            key=answered.key,
            protocol=answered.protocol,
            model=answered.model,
            finish=answered.finish,
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
        )
        if self.prices is None:
            return row
        tariff = self.prices.at(answered.at)
        return replace(
            row,
            priced_as=self.prices.priced_as,
            period=tariff.period,
            currency=tariff.currency,
            hit_picos=tariff.rates.hit,
            miss_picos=tariff.rates.miss,
            output_picos=tariff.rates.output,
            cost_picos=tariff.cost(prompt, cached, output),
        )

    async def begin(self, charge: Charge) -> None:
        """Write the row, on its way. Raises EngineUnavailable where that fails."""
        if self.ledger is not None:
            await self.ledger.begin(charge)

    def end(self, charge: Charge, *, sent: bool) -> None:
        """The end of the answer went out, or it did not."""
        if self.ledger is not None:
            (self.ledger.finish if sent else self.ledger.void)(charge.id)

    def priced(self, text: str, charge: Charge) -> str:
        """JSON of an event or a body, with the cost in its usage, where it has one."""
        if self.prices is None:
            return text
        value = _parsed(text)
        holder = _place(value)
        if holder is None:
            return text
        holder["usage"] |= {"cost": spelled(charge.cost_picos), "cost_currency": charge.currency}
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _of_engine(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens


def _of_wire(protocol: Protocol, told: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt, cached and output tokens of a usage object."""
    match protocol:
        case "messages":
            cached = int(told.get("cache_read_input_tokens") or 0)
            written = int(told.get("cache_creation_input_tokens") or 0)
            return int(told["input_tokens"]) + cached + written, cached, int(told["output_tokens"])
        case "responses":
            cached = int((told.get("input_tokens_details") or {}).get("cached_tokens") or 0)
            return int(told["input_tokens"]), cached, int(told["output_tokens"])
        case _:
            cached = int((told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            return int(told["prompt_tokens"]), cached, int(told["completion_tokens"])


def _place(value: Any) -> dict[str, Any] | None:
    """The object of an event or a body that holds its usage."""
    if not isinstance(value, dict):
        return None
    for holder in (value, value.get("response"), value.get("message")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            return holder
    return None


def _parsed(text: str) -> Any:
    # Most events hold no usage, and are not parsed for that.
    return json.loads(text) if '"usage"' in text and text.startswith("{") else None


def _usage_in(text: str) -> dict[str, Any] | None:
    holder = _place(_parsed(text))
    return None if holder is None else holder["usage"]


def _last_usage(batch: list[WireEvent]) -> dict[str, Any] | None:
    for event in reversed(batch):
        found = _usage_in(event.data)
        if found is not None and ("input_tokens" in found or "prompt_tokens" in found):
            return found
    return None


def open_billing(
    settings: Settings, names: Sequence[str], wall: Callable[[], float]
) -> Billing | None:
    """What the settings ask for. Raises ConfigError: no such price, or the ledger is unusable."""
    prices = None
    if settings.prices is not None:
        prices = read_prices(settings.prices, settings.priced_as or names[0])
    elif settings.priced_as is not None:
        raise ConfigError("priced_as names a model of a price table, and there is none: --prices")
    ledger = None if settings.ledger is None else Ledger(settings.ledger.expanduser())
    if prices is None and ledger is None:
        return None
    return Billing(prices, ledger, wall)
