from __future__ import annotations

import re

import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.api.metrics import HOST_REMOVAL_REASONS
from deepinfer_kvtier.base.timing import Histogram

LABEL = r'[a-z]+="[^"]+"'
SAMPLE = re.compile(rf"kvtier_[a-z0-9_]+(\{{{LABEL}(,{LABEL})*\}})? [0-9.e+-]+")


def samples(text: str) -> dict[str, float]:
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_the_page_is_valid_and_agrees_with_what_happened(cache, model):
    tokens = model.prompt(1, 4)
    model.store(tokens, states=(4,), durability="flushed").wait(60)
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
    assert found['kvtier_load_seconds_count{tier="host"}'] == 1
    assert found['kvtier_load_bytes_total{tier="host"}'] == 4 * 5_000
    assert found['kvtier_write_bytes_total{tier="disk"}'] == 4 * 5_000 + 9_001
    assert found['kvtier_put_bytes_by_class_total{class="chat"}'] == 4 * 5_000 + 9_001
    assert found['kvtier_put_seconds_bucket{tier="host",le="+Inf"}'] == 3
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


def test_the_hit_ratio_is_that_of_the_requests_and_of_each_tier(store, make_model):
    with kvtier.open(store, host_bytes=3 * 5_000) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 4, tail=0)
        model.store(tokens, durability="flushed").wait(60)
        cache.flush()
        for block in model.digests(tokens)[:2]:
            cache.host.remove(0, block)
        assert model.block_hits(tokens, leave_last=False) == 4
        assert model.block_hits(model.prompt(2, 4, tail=0)) == 0
        found = samples(cache.metrics())
        assert found["kvtier_hit_ratio"] == 0.5
        by_tier = {t: found[f'kvtier_hit_ratio_by_tier{{tier="{t}"}}'] for t in ("host", "disk")}
        assert sum(by_tier.values()) == 0.5
        assert by_tier["disk"] >= 0.25
        assert found["kvtier_hit_blocks_total"] == 4
        assert found["kvtier_missed_blocks_total"] == 3, "the last token is always computed"


def test_further_tiers_and_their_queues_are_on_the_page(store, tmp_path, make_model):
    pytest.importorskip("obstore")
    far = kvtier.S3TierConfig(url=f"file://{tmp_path}")
    with kvtier.open(store, tiers=[far], secret=bytes(32)) as cache:
        model = make_model(cache)
        model.store(model.prompt(1, 3))
        cache.flush()
        found = samples(cache.metrics())
    assert found['kvtier_tier_up{tier="s3"}'] == 1
    assert found['kvtier_tier_usage{tier="s3",what="put_records"}'] == 3
    assert found['kvtier_tier_queue_bytes{tier="s3"}'] == 0
    assert found['kvtier_write_bytes_total{tier="s3"}'] == 3 * 5_000


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
