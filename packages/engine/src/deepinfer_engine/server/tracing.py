"""OpenTelemetry traces: a span a request, with the stages of its answer below it.

The library is an extra and loaded where traces are asked for. Spans are made when the answer is
over, from durations: nothing is added to its path. A `traceparent` of the client is honoured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_engine import __version__
from deepinfer_engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

_OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}


@dataclass(frozen=True, slots=True)
class Traced:
    """One request that is over. Durations in seconds; `prepared`: until the engine was asked.

    stages: name and duration of what followed, in order. error: a code of this server's errors.
    """

    protocol: str
    request_id: str
    response_id: str
    duration: float
    prepared: float
    stages: tuple[tuple[str, float], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    error: str = ""


class Tracing:
    """Makes spans and hands them to an exporter, which sends them from a thread of its own."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("deepinfer", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def tell(self, traced: Traced, headers: Mapping[str, str]) -> None:
        """One request, over now."""
        from opentelemetry import trace

        end = time.time_ns()
        start = end - int(traced.duration * 1e9)
        parent = self._propagator.extract(headers)
        # The semantic conventions of OpenTelemetry for generative models, where they have a name.
        attributes: dict[str, str | int] = {
            "gen_ai.operation.name": _OPERATIONS.get(traced.protocol, traced.protocol),
            "gen_ai.provider.name": "deepinfer",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": traced.response_id,
            "gen_ai.usage.input_tokens": traced.prompt_tokens,
            "gen_ai.usage.output_tokens": traced.output_tokens,
            "deepinfer.protocol": traced.protocol,
            "deepinfer.request_id": traced.request_id,
            "deepinfer.cached_tokens": traced.cached_tokens,
        }
        if traced.finish:
            attributes["deepinfer.finish_reason"] = traced.finish
        if traced.error:
            attributes["error.type"] = traced.error
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model}",
            context=parent,
            kind=trace.SpanKind.SERVER,
            start_time=start,
            attributes=attributes,
        )
        if traced.error:
            span.set_status(trace.StatusCode.ERROR, traced.error)
        inside = trace.set_span_in_context(span)
        at = start
        for name, seconds in (("prepare", traced.prepared), *traced.stages):
            until = min(end, at + int(seconds * 1e9))
            self._tracer.start_span(name, context=inside, start_time=at).end(until)
            at = until
        span.end(end)

    def close(self) -> None:
        """Send what is left; waits a few seconds for a collector that is slow."""
        self._provider.force_flush(5000)
        self._provider.shutdown()


def open_tracing(where: str | None, model: str) -> Tracing | None:
    """The exporter of a setting: None, `console`, or the base URL of an OTLP/HTTP collector.

    Headers and the like come from OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_HEADERS`).
    Raises ConfigError: the extra is not installed, or this is no URL.
    """
    if where is None:
        return None
    if where != "console" and not where.startswith(("http://", "https://")):
        raise ConfigError(f"traces: wanted console or an http(s) URL, got {where!r}")
    try:
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

        exporter: SpanExporter
        if where == "console":
            exporter = ConsoleSpanExporter()
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=where.rstrip("/") + "/v1/traces")
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"traces need {exc.name}, which is not installed: pip install './packages/engine[otel]'"
        ) from exc
    provider = provider_of("deepinfer")
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider, model)


def provider_of(service: str) -> TracerProvider:
    """A provider whose spans name this service; `OTEL_SERVICE_NAME` wins."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    attributes = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", service),
        "service.version": __version__,
    }
    return TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
