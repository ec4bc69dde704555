"""Prometheus metrics of the HTTP process, and the workers' counters as they report them.

One registry per application, so that two servers in one process (tests) never share a counter. No
label holds anything a client chooses: cardinality is bounded by protocols, finish reasons and error
codes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deepinfer_engine.core.durations import MARK
from deepinfer_engine.core.types import Timings, Usage
from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.connections import ConnectionTable
from deepinfer_engine.server.limits import ByteBudget
from deepinfer_engine.server.tokenising import TokeniserProcesses

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5)
_STAGE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = tuple(4**power for power in range(11))  # 1 to 1,048,576
_E2E = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960)


class Metrics:
    """What the HTTP process measures itself. Times are seconds of its own monotonic clock."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._workers = _WorkerCollector()
        self.edge = EdgeCollector()
        self.registry.register(self._workers)
        self.registry.register(self.edge)
        registry = self.registry
        self.requests = Counter(
            "deepinfer_requests",
            "Generations that ended by themselves",
            ["protocol", "finish"],
            registry=registry,
        )
        self.errors = Counter(
            "deepinfer_request_errors",
            "Requests refused or failed",
            ["protocol", "code"],
            registry=registry,
        )
        self.unknown_fields = Counter(
            "deepinfer_request_unknown_fields",
            "Fields of requests that mean nothing here and were ignored",
            ["protocol"],
            registry=registry,
        )
        self.unenforced_tools = Counter(
            "deepinfer_requests_unenforced_tools",
            "Requests whose tool calls were not held to their schemas, for what that would cost",
            ["protocol"],
            registry=registry,
        )
        self.aborts = Counter(
            "deepinfer_aborts", "Generations given up", ["protocol", "cause"], registry=registry
        )
        self.in_flight = Gauge(
            "deepinfer_http_requests_in_flight", "Requests being answered", registry=registry
        )
        self.prompt_tokens = Counter("deepinfer_prompt_tokens", "Prompt tokens", registry=registry)
        self.cached_tokens = Counter(
            "deepinfer_cached_tokens",
            "Prompt tokens that came from the prompt cache",
            registry=registry,
        )
        self.generated_tokens = Counter(
            "deepinfer_generated_tokens", "Output tokens", registry=registry
        )
        self.drafted_tokens = Counter(
            "deepinfer_drafted_tokens", "Drafts put to verification", registry=registry
        )
        self.accepted_tokens = Counter(
            "deepinfer_accepted_tokens", "Drafts that were accepted", registry=registry
        )
        self.ttft = Histogram(
            "deepinfer_time_to_first_token_seconds",
            "From the request's arrival to its first token",
            ["protocol"],
            buckets=_TTFT,
            registry=registry,
        )
        self.itl = CountedHistogram(
            "deepinfer_inter_token_latency_seconds",
            "Time per output token after the first; a step that emits k tokens counts k times",
            _ITL,
        )
        registry.register(self.itl)
        stages = {
            "queue": "Waiting for the engine's memory",
            "prefill": "From there to the first token",
            "transfer": "From the first token until decode has the prompt's KV",
            "decode": "From there to the last token",
        }
        self.stages = {
            stage: Histogram(
                f"deepinfer_request_{stage}_seconds",
                text,
                ["protocol"],
                buckets=_STAGE,
                registry=registry,
            )
            for stage, text in stages.items()
        }
        self.prompt_lengths = Histogram(
            "deepinfer_request_prompt_tokens",
            "Prompt tokens of a request",
            ["protocol"],
            buckets=_TOKENS,
            registry=registry,
        )
        self.output_lengths = Histogram(
            "deepinfer_request_output_tokens",
            "Output tokens of a request",
            ["protocol"],
            buckets=_TOKENS,
            registry=registry,
        )
        self.e2e = Histogram(
            "deepinfer_e2e_request_latency_seconds",
            "From the request's arrival to the end of its answer",
            ["protocol"],
            buckets=_E2E,
            registry=registry,
        )

    def count_ignored(self, protocol: str, fields: int, unenforced: bool) -> None:
        """Add the ignored fields of a body, and whether its tools are left unenforced."""
        if fields:
            self.unknown_fields.labels(protocol).inc(fields)
        if unenforced:
            self.unenforced_tools.labels(protocol).inc()

    def count_stages(self, protocol: str, timings: Timings, decode_s: float) -> None:
        """Add where the time of one finished generation went."""
        self.stages["queue"].labels(protocol).observe(timings.queued)
        self.stages["prefill"].labels(protocol).observe(timings.prefill)
        self.stages["transfer"].labels(protocol).observe(timings.transferred)
        self.stages["decode"].labels(protocol).observe(max(0.0, decode_s))

    def count_usage(self, protocol: str, usage: Usage) -> None:
        """Add one finished generation's tokens."""
        self.prompt_lengths.labels(protocol).observe(usage.prompt_tokens)
        self.output_lengths.labels(protocol).observe(usage.completion_tokens)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.generated_tokens.inc(usage.completion_tokens)
        self.drafted_tokens.inc(usage.drafted_tokens)
        self.accepted_tokens.inc(usage.accepted_tokens)

    def render(self, workers: Sequence[WorkerStatus], accept: str) -> tuple[bytes, str]:
        """The exposition text and its content type: OpenMetrics when asked for, else the plain
        format.
        """
        self._workers.snapshot = tuple(workers)
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


class Counted:
    """One series of a `CountedHistogram`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int) -> None:
        """The same value so many times, for the price of once."""
        self.counts[bisect_left(self._bounds, value)] += times
        self.total += value * times


class CountedHistogram(Collector):
    """A histogram by protocol whose observations have a weight. Of one event loop."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._series: dict[str, Counted] = {}

    def labels(self, protocol: str) -> Counted:
        if protocol not in self._series:
            self._series[protocol] = Counted(self._bounds)
        return self._series[protocol]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["protocol"])
        names = [*(floatToGoString(bound) for bound in self._bounds), "+Inf"]
        for protocol, series in self._series.items():
            buckets = list(zip(names, accumulate(series.counts), strict=True))
            family.add_metric([protocol], buckets, series.total)
        yield family


class EdgeCollector(Collector):
    """Connections by phase, those that were ended, and what is held for bodies."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._closed: dict[str, int] = {}
        self._tokenised: dict[str, int] = {}
        self._body_bytes = 0

    def show(
        self,
        connections: ConnectionTable,
        tokenisers: TokeniserProcesses | None,
        bodies: ByteBudget,
    ) -> None:
        """What the next rendering tells."""
        self._open = connections.counts()
        self._closed = dict(connections.closed)
        self._tokenised = {} if tokenisers is None else dict(tokenisers.counters)
        self._body_bytes = bodies.held

    def collect(self) -> Iterable[Metric]:
        connections = GaugeMetricFamily(
            "deepinfer_http_connections", "Open connections", labels=["phase"]
        )
        for phase, number in self._open.items():
            connections.add_metric([phase], number)
        yield connections
        ended = CounterMetricFamily(
            "deepinfer_http_connections_ended", "Connections that the server ended",
            labels=["reason"],
        )  # fmt: skip
        for reason, number in self._closed.items():
            ended.add_metric([reason], number)
        yield ended
        yield GaugeMetricFamily(
            "deepinfer_http_body_bytes", "Bodies being received or read", self._body_bytes
        )
        for name, number in self._tokenised.items():
            yield CounterMetricFamily(f"deepinfer_{name}", name.replace("_", " "), value=number)


class _WorkerCollector(Collector):
    """Whatever the workers report, one family a name, labelled by role and worker."""

    def __init__(self) -> None:
        self.snapshot: tuple[WorkerStatus, ...] = ()

    def collect(self) -> Iterable[Metric]:
        ready = GaugeMetricFamily(
            "deepinfer_worker_ready", "1 = takes requests", labels=["role", "worker"]
        )
        for worker in self.snapshot:
            ready.add_metric([worker.role, worker.name], float(worker.ready))
        yield ready
        yield from self._histograms()
        yield from self._families("counters")
        yield from self._families("gauges")

    def _histograms(self) -> Iterator[Metric]:
        found = {name for worker in self.snapshot for name in worker.counters if MARK in name}
        for name in sorted({name.partition(MARK)[0] for name in found}):
            family = HistogramMetricFamily(
                "deepinfer_worker_" + re.sub(r"[^a-zA-Z0-9_]", "_", name),
                f"{name} as the workers report it",
                labels=["role", "worker"],
            )
            for worker in self.snapshot:
                parts = {
                    key.partition(MARK)[2]: value
                    for key, value in worker.counters.items()
                    if key.startswith(name + MARK)
                }
                total = parts.pop("sum", 0.0)
                if "inf" not in parts:
                    continue
                ends = sorted((float(end), value) for end, value in parts.items())
                buckets = [(floatToGoString(end), value) for end, value in ends]
                family.add_metric([worker.role, worker.name], buckets, total)
            yield family

    def _families(self, kind: str) -> Iterator[Metric]:
        names = sorted(
            {n for worker in self.snapshot for n in getattr(worker, kind) if MARK not in n}
        )
        for name in names:
            metric = "deepinfer_worker_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            metric = re.sub("_s$", "_seconds", metric)  # units are spelled out
            text = f"{name} as the workers report it"
            labels = ["role", "worker"]
            family: CounterMetricFamily | GaugeMetricFamily
            if kind == "counters":
                family = CounterMetricFamily(metric.removesuffix("_total"), text, labels=labels)
            else:
                # `_total` is the ending of counters, by the rules of the format.
                named = re.sub(r"_total$", "_capacity", metric)
                family = GaugeMetricFamily(named, text, labels=labels)
            for worker in self.snapshot:
                value = getattr(worker, kind).get(name)
                if value is not None:
                    family.add_metric([worker.role, worker.name], float(value))
            yield family
