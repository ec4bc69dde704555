"""What `/metrics` tells Prometheus. One registry an application, so that two never mix."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deepinfer_search_fetch.models import SearchResponse
from deepinfer_search_fetch.service.metering import Charge

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters and histograms of one service."""

    def __init__(self, documents: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "search_fetch_responses",
            "Answers by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "search_fetch_request_seconds",
            "From the first byte of the request to the last of the answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.search_seconds = Histogram(
            "search_fetch_search_seconds",
            "Time in the index and the ranking.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "search_fetch_in_flight",
            "Requests at work now, without health and metrics.",
            registry=self.registry,
        )
        self.fetches = Counter(
            "search_fetch_fetches",
            "Fetch results: ok, or the error code.",
            ["result"],
            registry=self.registry,
        )
        self.cache = Counter(
            "search_fetch_cache",
            "Fetches answered from the cache (hit) or not (miss).",
            ["result"],
            registry=self.registry,
        )
        self.ledger_rows = Counter(
            "search_fetch_ledger_rows", "Billable calls.", ["endpoint"], registry=self.registry
        )
        self.voided = Counter(
            "search_fetch_undelivered",
            "Billable answers whose client left before the last byte.",
            registry=self.registry,
        )
        self.tool_calls = Counter(
            "search_fetch_mcp_calls",
            "MCP tool calls by tool and result.",
            ["tool", "result"],
            registry=self.registry,
        )
        Gauge(
            "search_fetch_index_documents", "Pages in the index.", registry=self.registry
        ).set_function(documents)

    def searched(self, response: SearchResponse) -> None:
        """One search that answered."""
        self.search_seconds.observe(response.elapsed_ms / 1000)

    def billed(self, charges: Iterable[Charge]) -> None:
        """Rows that were written."""
        for charge in charges:
            self.ledger_rows.labels(charge.endpoint).inc(charge.quantity)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
