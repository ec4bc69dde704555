from __future__ import annotations

import re

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.metrics import HOST_REMOVAL_REASONS, Histogram

SAMPLE = re.compile(r'kvtier_[a-z0-9_]+(\{[a-z]+="[^"]+"(,[a-z]+="[^"]+")*\})? [0-9.e+-]+')


def samples(text: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_the_page_is_valid_and_agrees_with_what_happened(cache, model):
    tokens = model.prompt(1, 4)
    model.store(tokens, states=(4,), durability="flushed").wait(10)
    model.load_all(tokens)
    model.store(model.prompt(2, 1), confirmed_tokens=0)
    page = cache.metrics()
    for line in page.splitlines():
        assert line.startswith(("# HELP kvtier_", "# TYPE kvtier_")) or SAMPLE.fullmatch(line), line
    found = samples(page)
    assert found["kvtier_matches_total"] == 1
    assert found['kvtier_hit_tokens_total{tier="host"}'] == 512
    assert found['kvtier_put_refused_total{reason="unconfirmed"}'] == 1
    assert found['kvtier_load_records_total{status="ok"}'] == 4
    assert found["kvtier_disk_entries"] == 5
    assert found["kvtier_load_seconds_count"] == 1
    assert found["kvtier_health"] == 1
    assert found[f'kvtier_namespace_hit_tokens_total{{namespace="{model.ns.id}"}}'] == 512


def test_what_left_memory_is_counted_by_reason_and_policy(make_model):
    with kvtier.open(host_bytes=8 * 5_000, host_policy="session") as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 8))
        model.store(model.prompt(2, 3))
        model.ns.drop(model.digests(model.prompt(2, 3))[:2])
        found = samples(cache.metrics())
    removed = {
        reason: found[f'kvtier_host_removed_records_total{{policy="session",reason="{reason}"}}']
        for reason in HOST_REMOVAL_REASONS
    }
    assert removed == {
        "evicted": 3, "state_evicted": 0, "state_expired": 0, "dropped": 2, "damaged": 0
    }  # fmt: skip
    assert found["kvtier_host_policy_failures_total"] == 0


def test_every_family_is_declared_once(cache):
    names = re.findall(r"^# TYPE (\S+)", cache.metrics(), re.M)
    assert len(names) == len(set(names)) > 30


def test_neither_model_nor_tenant_appear_in_metrics(cache, make_model):
    model = make_model(cache, salt="tenant-acme", model="model-secret")
    model.store(model.prompt(1, 2))
    model.load_all(model.prompt(1, 2))
    page = cache.metrics() + str(cache.stats())
    assert "acme" not in page
    assert "secret" not in page


def test_histogram_counts_are_cumulative_and_bounds_inclusive():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.snapshot() == {
        "buckets": [("1.0", 2), ("2.0", 3), ("+Inf", 4)],
        "sum": 12.0,
        "count": 4,
    }
