"""What is seen of a server: stages, other servers' metric names, the dashboard, `top`, traces."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as families
from rich.console import Console
from server_fakes import FakeClock, FakeEngine, Script, byte_codec
from server_socket import serving
from toy_engine import cluster, patient, run, toy

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.cli import main as cli
from deepinfer_engine.cli.top import screen
from deepinfer_engine.core.durations import BOUNDS, Durations
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.app import create_app
from deepinfer_engine.server.history import History, percentile
from deepinfer_engine.server.metrics import Metrics
from deepinfer_engine.server.tracing import Tracing, open_tracing, provider_of
from deepinfer_engine.settings import Settings

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "deepinfer.json"
BODY = {"model": "toy", "max_tokens": 6, "messages": [{"role": "user", "content": "hi"}]}
NAME = re.compile(r"\b(?:deepinfer|vllm|sglang)[_:][a-z0-9_:]+")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """(text of /metrics, answer of /status) of a server of three parts behind a few answers."""
    folder = tmp_path_factory.mktemp("kv")
    found = {}

    async def body():
        stores = iter(range(9))
        async with cluster(
            prefill_runner=lambda: toy(vocab_size=512),
            decode_runner=lambda: toy(vocab_size=512),
            store=lambda runner: open_store(patient(folder / str(next(stores))), runner.layout),
        ) as it:
            settings = Settings(metrics_compat=("vllm", "sglang"))
            app = create_app(it.engine, byte_codec(), settings)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                for stream in (False, True, False):
                    body = {**BODY, "stream": stream}
                    reply = await client.post("/v1/chat/completions", json=body)
                    assert reply.status_code == 200, reply.text
                for _ in range(500):
                    for worker in it.workers:
                        for peer in worker.service.peers:
                            worker.service._beat(peer)
                    text = found["metrics"] = (await client.get("/metrics")).text
                    if total(text, "deepinfer_worker_transfer_seconds_count", role="prefill") >= 3:
                        break
                    await asyncio.sleep(0.01)
                found["status"] = (await client.get("/status")).json()
            app.state.services.close()

    run(body())
    return found["metrics"], found["status"]


def values(text, name, **labels):
    return [
        sample.value
        for family in families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def total(text, name, **labels):
    return sum(values(text, name, **labels))


def test_stages_of_a_request_and_times_of_workers_are_measured(seen):
    text, _ = seen
    for stage in ("queue", "prefill", "transfer", "decode"):
        assert total(text, f"deepinfer_request_{stage}_seconds_count", protocol="chat") == 3
    # The stages are parts of the whole: they are measured one behind the other.
    parts = sum(total(text, f"deepinfer_request_{s}_seconds_sum") for s in ("queue", "prefill"))
    assert parts <= total(text, "deepinfer_e2e_request_latency_seconds_sum")
    assert total(text, "deepinfer_worker_queue_seconds_count", role="prefill") == 3
    assert total(text, "deepinfer_worker_queue_seconds_count", role="decode") == 3
    assert total(text, "deepinfer_worker_transfer_seconds_count", role="prefill") == 3


def test_names_of_vllm_and_sglang_tell_the_same_numbers(seen):
    text, _ = seen
    same = {
        "vllm:prompt_tokens_total": "deepinfer_prompt_tokens_total",
        "vllm:generation_tokens_total": "deepinfer_generated_tokens_total",
        "vllm:prefix_cache_hits_total": "deepinfer_cached_tokens_total",
        "vllm:request_success_total": "deepinfer_requests_total",
        "vllm:time_to_first_token_seconds_count": "deepinfer_time_to_first_token_seconds_count",
        "vllm:request_queue_time_seconds_sum": "deepinfer_request_queue_seconds_sum",
        "vllm:inter_token_latency_seconds_count": "deepinfer_inter_token_latency_seconds_count",
        "sglang:generation_tokens_total": "deepinfer_generated_tokens_total",
        "sglang:num_requests_total": "deepinfer_requests_total",
        "sglang:e2e_request_latency_seconds_count": "deepinfer_e2e_request_latency_seconds_count",
    }
    for theirs, ours in same.items():
        assert values(text, theirs), theirs
        assert total(text, theirs) == pytest.approx(total(text, ours)), theirs
    assert total(text, "vllm:request_success_total", model_name="toy") == 3
    assert len(values(text, "vllm:num_requests_running", model_name="toy")) == 2
    assert 0 <= total(text, "sglang:token_usage") <= 1
    assert total(text, "sglang:kv_transfer_total_mb_total") > 0


def test_those_names_are_there_only_when_asked_for(request_json):
    text = request_json(Script(), "GET", "/metrics").text
    assert "vllm:" not in text
    assert "sglang:" not in text
    only = request_json(Script(), "GET", "/metrics", settings={"metrics_compat": "vllm"}).text
    assert "vllm:" in only
    assert "sglang:" not in only


def test_every_metric_of_the_dashboard_is_one_that_the_server_has(seen):
    text, _ = seen
    there = {sample.name for family in families(text) for sample in family.samples}
    # Families without a series yet, such as errors by code.
    there |= set(re.findall(r"^# TYPE (\S+)", text, re.M))
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    wanted = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    assert len(wanted) > 20
    assert wanted <= there, sorted(wanted - there)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        assert panel["targets"], panel["title"]
    labels = {label for family in families(text) for s in family.samples for label in s.labels}
    named = re.findall(r"\{\{(\w+)\}\}", DASHBOARD.read_text(encoding="utf-8"))
    assert set(named) <= labels | {"code", "cause"}


def test_durations_are_cumulative_and_their_sum_is_exact():
    durations = Durations("x")
    for seconds in (0.0, BOUNDS[0], 0.3, 1000.0, -1.0):
        durations.observe(seconds)
    found = durations.counters()
    assert found["x_seconds|0.001"] == 3
    assert found["x_seconds|0.5"] == 4
    assert found["x_seconds|300"] == 4
    assert found["x_seconds|inf"] == 5
    assert found["x_seconds|sum"] == pytest.approx(1000.301)


@pytest.mark.parametrize(
    ("buckets", "part", "expected"),
    [
        ([(1.0, 0), (2.0, 10), (float("inf"), 10)], 0.5, 1.5),
        ([(1.0, 10), (float("inf"), 10)], 0.9, 0.9),
        ([(1.0, 1), (float("inf"), 10)], 0.99, 1.0),
        ([(1.0, 0), (float("inf"), 0)], 0.5, None),
        ([], 0.5, None),
    ],
)
def test_percentiles_come_from_buckets(buckets, part, expected):
    assert percentile(buckets, part) == expected


def test_recent_numbers_are_those_of_the_last_minute():
    metrics, history, now = Metrics(), History(), 1000.0
    history.begin(now)
    metrics.generated_tokens.inc(50)
    first = history.look(metrics, now + 10)
    assert (first["seconds"], first["generated_tokens"], first["hit_rate"]) == (10, 50, None)
    metrics.prompt_tokens.inc(100)
    metrics.cached_tokens.inc(25)
    metrics.ttft.labels("chat").observe(0.5)
    second = history.look(metrics, now + 30)
    assert (second["seconds"], second["generated_tokens"]) == (30, 50)  # still all there was
    assert second["hit_rate"] == 0.25
    assert 0.25 < second["ttft"]["p50"] <= 0.5
    for t in range(32, 130, 2):
        last = history.look(metrics, now + t)
    assert 60 <= last["seconds"] <= 62
    assert (last["prompt_tokens"], last["ttft"]["p50"]) == (0, None)


def shown(status) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(screen("http://here:8000", status))
    return console.export_text()


def test_top_shows_roles_queues_hits_and_times(seen):
    _, status = seen
    text = shown(status)
    for word in ("prefill", "decode", "ready", "cache hits", "first token", "token gap", "p99"):
        assert word in text
    assert re.search(r"answers 3\b", text)
    status["workers"][0] |= {"ready": False, "detail": "went away"}
    status["problems"] = ["prefill a cannot reach decode b"]
    text = shown(status)
    assert "went away" in text
    assert "cannot reach" in text


def test_top_asks_a_running_server(capsys, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ana:the-key-of-ana-01234\n")
    engine = FakeEngine(Script())
    settings = Settings(api_key_file=keys, host="0.0.0.0")
    with serving(lambda: create_app(engine, byte_codec(), settings)) as server:
        assert cli.run(["top", server.url, "--json", "--api-key", "the-key-of-ana-01234"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "ready"
        assert cli.run(["top", server.url, "--once", "--api-key", "the-key-of-ana-01234"]) == 0
        assert "w0" in capsys.readouterr().out
        assert cli.run(["top", server.url, "--once"]) == 1  # this one shows nothing without a key
        assert "401" in capsys.readouterr().err
    assert cli.run(["top", "http://127.0.0.1:9", "--once"]) == 4


# -- traces ---------------------------------------------------------------------------------------

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def traced(codec):
    """(app, clock, spans): spans come where the app has made them."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    spans = memory.InMemorySpanExporter()
    provider = provider_of("deepinfer")
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    clock = FakeClock()
    app = create_app(FakeEngine(Script()), codec, Settings(), clock=clock)
    app.state.services.tracing = Tracing(provider, "toy")
    yield app, clock, spans
    app.state.services.close()


def ask(app, body, **headers):
    async def go():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    return asyncio.run(go())


def test_a_request_is_a_span_of_its_clients_trace_with_its_stages(traced):
    from deepinfer_engine.core.types import FinishEvent, Timings, TokensEvent, Usage

    app, clock, spans = traced

    async def generate(request):
        clock.now += 3.0
        yield TokensEvent(0, (70,), (), 4)
        clock.now += 2.0
        yield FinishEvent("length", Usage(10, 1, 4), Timings(0.5, 2.25, 0.25))

    app.state.services.engine.generate = generate
    parent = f"00-{TRACE}-b7ad6b7169203331-01"
    reply = ask(app, {**BODY, "max_tokens": 1}, traceparent=parent, **{"x-request-id": "r-1"})
    assert reply.status_code == 200, reply.text
    *stages, root = spans.get_finished_spans()
    assert root.name == "chat toy"
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.attributes["deepinfer.request_id"] == "r-1"
    assert root.attributes["gen_ai.response.id"] == reply.json()["id"]
    assert root.attributes["gen_ai.usage.input_tokens"] == 10
    assert root.attributes["deepinfer.cached_tokens"] == 4
    assert root.attributes["deepinfer.finish_reason"] == "length"
    assert root.end_time - root.start_time == 5_000_000_000
    lengths = {s.name: (s.end_time - s.start_time) / 1e9 for s in stages}
    assert lengths == {
        "prepare": 0, "queue": 0.5, "prefill": 2.25, "transfer": 0.25, "decode": 2.0,
    }  # fmt: skip
    assert all(s.parent.span_id == root.context.span_id for s in stages)
    at = root.start_time
    for span in stages:  # one behind the other, inside the request
        assert span.start_time == at
        at = span.end_time
    assert at == root.end_time


def test_a_refused_request_is_a_failed_span(traced):
    app, _, spans = traced
    assert ask(app, {"model": "nobody", "messages": []}).status_code == 404
    root = spans.get_finished_spans()[-1]
    assert not root.status.is_ok
    assert root.attributes["error.type"] == "model_not_found"


def test_spans_reach_a_collector_over_http():
    import http.server
    import threading

    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        settings = Settings(traces=f"http://127.0.0.1:{collector.server_port}")
        app = create_app(FakeEngine(Script([[70], [1]])), byte_codec(), settings)
        assert ask(app, BODY).status_code == 200
        app.state.services.close()
        collector.shutdown()
        thread.join()
    ((path, data),) = got
    assert path == "/v1/traces"
    assert b"chat toy" in data


def test_traces_elsewhere_are_refused():
    assert open_tracing(None, "m") is None
    with pytest.raises(ConfigError, match="console or an http"):
        open_tracing("localhost:4317", "m")
