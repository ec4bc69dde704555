"""What `/metrics` says of a whole server, by the rules that Prometheus' own linter has."""

from __future__ import annotations

import re
import shutil
import subprocess

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain
from server_fakes import byte_codec
from toy_engine import cluster, patient, run, toy
from toy_grammar import ToyCompiler

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import Settings

OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
# The library writes the times at which counters began as gauges of their own, `_created`.
SUFFIXES = re.compile("_(total|count|sum|bucket|info)$")
UNITS = re.compile("_(milliseconds|microseconds|minutes|hours|kilobytes|megabytes)$")
ABBREVIATED = re.compile("_(s|ms|us|ns|sec|b|kb|mb|gb|tb|pb|m|h|d)(?=_|$)")
PROMTOOL = shutil.which("promtool")
"""Debian's package prometheus has it; the rules above are its own, so that they hold without."""
TYPE_NAMES = re.compile("(^|_)(counter|gauge|histogram|summary|untyped)(_|$)")


def faults(families) -> list[str]:
    """What a linter would say; for a gauge that ends in `_total` among others."""
    found = []
    names = set()
    for family in families:
        name = family.name
        if name in names:
            found.append(f"{name} comes twice")
        names.add(name)
        if not family.documentation:
            found.append(f"{name} has no help text")
        if family.type not in ("counter", "gauge", "histogram"):
            found.append(f"{name} is {family.type}")
        if not re.fullmatch("[a-z_][a-z0-9_]*", name):
            found.append(f"{name} is not in snake case")
        # The parsers give a counter's name without its _total.
        matches = (rule.search(name) for rule in (SUFFIXES, UNITS, ABBREVIATED, TYPE_NAMES))
        found += [f"{family.type} {name} has {match.group()}" for match in matches if match]
        series = set()
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if key in series:
                found.append(f"{key} comes twice")
            series.add(key)
            if family.type == "counter" and not sample.name.endswith(("_total", "_created")):
                found.append(f"counter {sample.name} lacks _total")
            if family.type == "gauge" and sample.name != name:
                found.append(f"gauge {name} has a sample {sample.name}")
    return found


def test_everything_a_whole_server_reports_passes_the_linters_rules(tmp_path):
    def wide():
        return toy(vocab_size=512)

    async def body():
        stores = iter(range(9))
        async with cluster(
            prefill_runner=wide,
            decode_runner=wide,
            store=lambda runner: open_store(patient(tmp_path / str(next(stores))), runner.layout),
            grammars=ToyCompiler,
        ) as it:
            app = create_app(it.engine, byte_codec(), Settings())
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                body = {"model": "toy", "max_tokens": 3, "messages": [
                    {"role": "user", "content": "hi"}]}  # fmt: skip
                answered = await client.post("/v1/chat/completions", json=body)
                assert answered.status_code == 200, answered.text
                refused = await client.post("/v1/messages", json={"model": "toy"})
                assert refused.status_code == 400
                for worker in it.workers:
                    for peer in worker.service.peers:
                        worker.service._beat(peer)
                while b"grammar_queue" not in (text := await client.get("/metrics")).content:
                    pass
                strict = await client.get("/metrics", headers=OPENMETRICS)
            reported = list(plain(text.text))
            assert faults(reported) == []
            assert faults(openmetrics(strict.text)) == []
            if PROMTOOL is not None:
                check = [PROMTOOL, "check", "metrics"]
                said = subprocess.run(check, input=text.content, capture_output=True, check=False)
                assert (said.returncode, said.stdout + said.stderr) == (0, b"")
            names = {family.name for family in reported}
            assert {"deepinfer_requests", "deepinfer_worker_blocks_capacity"} <= names
            assert any(name.startswith("deepinfer_worker_store_") for name in names)
            app.state.services.close()

    run(body())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("# HELP a_total b\n# TYPE a_total gauge\na_total 1\n", "gauge a_total has _total"),
        ("# TYPE a gauge\na 1\n", "a has no help text"),
        ("# HELP a_ms b\n# TYPE a_ms gauge\na_ms 1\n", "gauge a_ms has _ms"),
        ("# HELP a_off_s b\n# TYPE a_off_s gauge\na_off_s 1\n", "gauge a_off_s has _s"),
        ("a 1\n", "a is unknown"),
    ],
)
def test_the_rules_find_what_they_are_for(text, fault):
    assert fault in faults(plain(text))
