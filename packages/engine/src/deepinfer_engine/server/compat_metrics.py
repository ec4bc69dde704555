"""The same measurements under the names that dashboards for vLLM and SGLang know.

Only what is measured here has a name: a series that would always be zero is left out. Times and
token counts are those of this server's clients; what is of a worker has `engine`, its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from deepinfer_engine.router.client import WorkerStatus
from deepinfer_engine.server.metrics import Metrics

Family = Literal["vllm", "sglang"]
_FINISHED = {"stop": "stop", "length": "length"}


class CompatCollector(Collector):
    """Reads what `Metrics` holds; `show` before each rendering."""

    def __init__(self, metrics: Metrics, families: Sequence[Family], model: str) -> None:
        self._metrics = metrics
        self._families = tuple(dict.fromkeys(families))
        self._model = model
        self._workers: tuple[WorkerStatus, ...] = ()

    def show(self, workers: Sequence[WorkerStatus]) -> None:
        """What the next rendering tells of workers."""
        self._workers = tuple(workers)

    def collect(self) -> Iterable[Metric]:
        if "vllm" in self._families:
            yield from self._vllm()
        if "sglang" in self._families:
            yield from self._sglang()

    # -- vLLM -----------------------------------------------------------------------------------

    def _vllm(self) -> Iterator[Metric]:
        m = self._metrics
        workers = self._each
        yield workers("vllm:num_requests_running", "running", "prefilling", "transferring")
        yield workers("vllm:num_requests_waiting", "waiting", "loading", "reserve_queue", "parked")
        usage = GaugeMetricFamily(
            "vllm:kv_cache_usage_perc", "Part of the KV blocks in use", labels=_LABELS
        )
        for engine, worker in enumerate(self._workers):
            if (total := worker.gauges.get("blocks_capacity", 0.0)) > 0:
                used = 1 - worker.gauges.get("blocks_free", 0.0) / total
                usage.add_metric([self._model, str(engine)], used)
        yield usage
        yield workers("vllm:num_preemptions", "preemptions", kind="counters")
        for name, counter in (
            ("vllm:prefix_cache_queries", m.prompt_tokens),
            ("vllm:prefix_cache_hits", m.cached_tokens),
            ("vllm:prompt_tokens", m.prompt_tokens),
            ("vllm:generation_tokens", m.generated_tokens),
            ("vllm:spec_decode_num_draft_tokens", m.drafted_tokens),
            ("vllm:spec_decode_num_accepted_tokens", m.accepted_tokens),
        ):
            yield self._total(name, counter, _LABELS)
        success = CounterMetricFamily(
            "vllm:request_success", "Answers by how they ended",
            labels=[*_LABELS, "finished_reason"],
        )  # fmt: skip
        for reason, number in _by(m.requests, "finish").items():
            success.add_metric([self._model, "0", _FINISHED.get(reason, "abort")], number)
        yield success
        for name, histogram in (
            ("vllm:time_to_first_token_seconds", m.ttft),
            ("vllm:inter_token_latency_seconds", m.itl),
            ("vllm:e2e_request_latency_seconds", m.e2e),
            ("vllm:request_queue_time_seconds", m.stages["queue"]),
            ("vllm:request_prefill_time_seconds", m.stages["prefill"]),
            ("vllm:request_decode_time_seconds", m.stages["decode"]),
            ("vllm:request_prompt_tokens", m.prompt_lengths),
            ("vllm:request_generation_tokens", m.output_lengths),
        ):
            yield self._histogram(name, histogram, _LABELS)

    # -- SGLang ---------------------------------------------------------------------------------

    def _sglang(self) -> Iterator[Metric]:
        m = self._metrics
        decode = [w for w in self._workers if w.role in ("decode", "single")]
        prefill = [w for w in self._workers if w.role in ("prefill", "single")]
        everybody = self._workers
        used = sum(_gauge([w], "blocks_capacity") - _gauge([w], "blocks_free") for w in decode)
        most = _gauge(decode, "blocks_capacity")
        prompt, cached = _value(m.prompt_tokens), _value(m.cached_tokens)
        for name, value in (
            ("sglang:num_running_reqs", _gauge(decode, "running")),
            ("sglang:num_queue_reqs", _gauge(prefill, "waiting")),
            ("sglang:num_grammar_queue_reqs", _gauge(everybody, "grammar_queue")),
            ("sglang:num_prefill_inflight_queue_reqs", _gauge(prefill, "transferring")),
            ("sglang:num_decode_prealloc_queue_reqs", _gauge(decode, "reserve_queue")),
            ("sglang:num_decode_transfer_queue_reqs", _gauge(decode, "transferring")),
            ("sglang:token_usage", used / most if most else 0.0),
            ("sglang:cache_hit_rate", cached / prompt if prompt else 0.0),
        ):
            yield self._gauge(name, value)
        drafted = _value(m.drafted_tokens)
        if drafted:
            yield self._gauge("sglang:spec_accept_rate", _value(m.accepted_tokens) / drafted)
        for name, counter in (
            ("sglang:prompt_tokens", m.prompt_tokens),
            ("sglang:generation_tokens", m.generated_tokens),
            ("sglang:cached_tokens", m.cached_tokens),
            ("sglang:num_requests", m.requests),
            ("sglang:num_aborted_requests", m.aborts),
        ):
            yield self._total(name, counter, _MODEL)
        sent = sum(w.counters.get("transfer_bytes", 0.0) for w in prefill)
        family = CounterMetricFamily(
            "sglang:kv_transfer_total_mb", "KV sent to decode, in megabytes", labels=_MODEL
        )
        family.add_metric([self._model], sent / 1e6)
        yield family
        for name, histogram in (
            ("sglang:time_to_first_token_seconds", m.ttft),
            ("sglang:inter_token_latency_seconds", m.itl),
            ("sglang:e2e_request_latency_seconds", m.e2e),
        ):
            yield self._histogram(name, histogram, _MODEL)

    # -- forms ----------------------------------------------------------------------------------

    def _values(self, labels: Sequence[str]) -> list[str]:
        return [self._model, "0"][: len(labels)]

    def _gauge(self, name: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, _text(name), labels=_MODEL)
        family.add_metric([self._model], value)
        return family

    def _each(
        self, name: str, *names: str, kind: Literal["gauges", "counters"] = "gauges"
    ) -> Metric:
        make = GaugeMetricFamily if kind == "gauges" else CounterMetricFamily
        family = make(name, _text(name), labels=_LABELS)
        for engine, worker in enumerate(self._workers):
            found = getattr(worker, kind)
            family.add_metric([self._model, str(engine)], sum(found.get(n, 0.0) for n in names))
        return family

    def _total(self, name: str, counter: Collector, labels: Sequence[str]) -> Metric:
        family = CounterMetricFamily(name, _text(name), labels=labels)
        family.add_metric(self._values(labels), _value(counter))
        return family

    def _histogram(self, name: str, histogram: Collector, labels: Sequence[str]) -> Metric:
        """Of all protocols together."""
        buckets, total = summed(histogram)
        family = HistogramMetricFamily(name, _text(name), labels=labels)
        named = [(floatToGoString(end), value) for end, value in buckets]
        family.add_metric(self._values(labels), named or [("+Inf", 0.0)], total)
        return family


_LABELS = ("model_name", "engine")
_MODEL = ("model_name",)


def _text(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")


def _gauge(workers: Iterable[WorkerStatus], name: str) -> float:
    return sum(worker.gauges.get(name, 0.0) for worker in workers)


def _value(counter: Collector) -> float:
    return sum(_by(counter, None).values())


def _by(counter: Collector, label: str | None) -> Counter[str]:
    found: Counter[str] = Counter()
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                found[sample.labels[label] if label else ""] += sample.value  # type: ignore[assignment]
    return found


def summed(histogram: Collector) -> tuple[list[tuple[float, float]], float]:
    """Buckets (upper end, observations up to there) and the sum, over all labels."""
    buckets: Counter[float] = Counter()
    total = 0.0
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket"):
                buckets[float(sample.labels["le"])] += sample.value  # type: ignore[assignment]
            elif sample.name.endswith("_sum"):
                total += sample.value
    return sorted(buckets.items()), total
