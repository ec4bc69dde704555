"""Counters of a cache as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Kind = Literal["counter", "gauge"]

# Metric (those that end in "_total" are counters, the others gauges), section of `stats()` and key
# in it, help.
_PLAIN = """
matches_total hits.matches Prefix lookups.
prompt_tokens_total hits.prompt_tokens Tokens of looked-up prompts.
hit_blocks_total hits.hit_blocks Blocks that lookups found.
missed_blocks_total hits.missed_blocks Blocks they did not find.
state_hits_total hits.state_hits Lookups that found a state slot.
state_misses_total hits.state_misses Lookups that found none.
shared_reads_total loads.shared_reads Records another load read.
host_capacity_bytes host.capacity_bytes Size of the memory tier.
host_block_bytes host.block_bytes Blocks in memory.
host_state_bytes host.state_bytes State slots in memory.
host_policy_failures_total host.policy_failures Policies replaced.
host_corrupt_total host.corrupt Records damaged in memory.
disk_entries disk.entries Records in the index.
disk_index_bytes disk.index_bytes Memory of the index.
disk_segments disk.segments Segment files.
disk_write_breaker_open disk.write_breaker_open 1 while nothing is written to the disk.
disk_breaker_open disk.breaker_open 1 while the disk is left alone.
disk_read_bytes_total disk.read_bytes Verified bytes read.
disk_written_payload_bytes_total disk.written_payload_bytes Payload written by this process.
disk_written_file_bytes_total disk.written_file_bytes File bytes written by this process.
disk_corrupt_total disk.corrupt Records with a wrong checksum.
disk_quarantined_total disk.quarantined Slots never read again.
disk_digest_mismatch_total disk.digest_mismatch Other records met.
disk_short_reads_total disk.short_reads Reads that ended early.
disk_read_errors_total disk.read_errors Reads that failed.
disk_gc_bytes_total disk.gc_bytes Bytes collected.
disk_gc_copied_bytes_total disk.gc_copied_bytes Rewritten while collecting.
disk_spared_records_total disk.gc_spared_records Kept from eviction.
disk_gc_low_space_total disk.gc_low_space Collections short of space.
disk_low_space disk.low_space 1 while the file system is short.
disk_write_amplification disk.write_amplification File per put byte.
disk_evicted_before_floor_total disk.evicted_before_floor Records evicted younger than the floor.
io_fallbacks_total io.fallbacks Segments opened without O_DIRECT.
l2_readback_ok_ratio readback.l2_readback_ok_ratio Of the written records read back as a test.
l2_readback_bad_total readback.l2_readback_bad Of those, not as written.
l2_silent readback.l2_silent 1 = written to and asked, no hit for 10 min.
disk_expanded_bytes_total disk.expanded_bytes Bytes of compressed records read.
disk_expand_seconds_total disk.expand_s Time of expanding them.
disk_codec_missing_total disk.codec_missing Not expandable here.
compression_bytes_before_total compression.bytes_before Bytes given to codecs.
compression_bytes_after_total compression.bytes_after What was stored of them.
compression_records_total compression.records Records compressed.
compression_plain_records_total compression.plain_records Records that did not shrink.
compression_seconds_total compression.seconds Time of codecs.
queue_bytes queue.queued_bytes Bytes waiting for the directory.
queue_failed_records_total queue.failed_records Records given up on.
queue_source_changed_total queue.source_changed Sources changed too early.
queue_write_errors_total queue.write_errors Writes that failed.
approximate_share replay.approximate_share Of the blocks put.
approximate_blocks_total replay.approximate_blocks Put as such.
window_dead_peers windows.dead_peers Machines left alone now.
window_location_records windows.location_records Hints this machine keeps for all.
window_waiting_announcements windows.waiting_announcements Changes others were not told of.
leases_active leases.active Matches that hold pins.
leases_expired_total leases.expired Leases that ran out.
"""

HOST_REMOVAL_REASONS = {
    "evicted": "evicted",
    "state_evicted": "evicted_states",
    "state_expired": "expired",
    "dropped": "dropped",
    "damaged": "damaged",
}

REMOVAL_REASONS = {
    "expired": "gc_expired_records",
    "evicted": "gc_evicted_records",
    "namespace_quota": "gc_namespace_records",
}


_WINDOW_GAUGES = ("dead_peers", "location_records", "waiting_announcements")


def render(stats: Mapping[str, Any]) -> str:
    """`Cache.stats()` as Prometheus text; namespaces appear under their opaque id."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: Mapping[str, Any]) -> Iterator[str]:
    for row in _PLAIN.strip().splitlines():
        name, place, text = row.split(" ", 2)
        section, key = place.split(".")
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        yield from _family(name, kind, text, [("", stats[section].get(key, 0))])
    yield from _rates(stats["hits"])
    yield from _family(
        "hit_tokens_total",
        "counter",
        "Prompt tokens found, by tier.",
        _by_suffix(stats["hits"], "hit_tokens_", "tier"),
    )
    yield from _family(
        "state_hits_by_tier_total",
        "counter",
        "Lookups that found a state slot, by tier; peer = at another machine.",
        _by_suffix(stats["hits"], "state_hits_", "tier"),
    )
    yield from _family(
        "plans_total",
        "counter",
        "Plans, by where the window state comes from.",
        _by_suffix(stats["replay"], "plans_", "state"),
    )
    yield from _family(
        "window_events_total",
        "counter",
        "What the exchange of windows with other machines counts.",
        [
            (f'{{what="{key}"}}', count)
            for key, count in sorted(stats["windows"].items())
            if key not in _WINDOW_GAUGES
        ],
    )
    yield from _family(
        "host_removed_records_total",
        "counter",
        "Records that left memory: blocks by the policy, state slots, all by reason.",
        [
            (f'{{policy="{stats["host"]["policy"]}",reason="{reason}"}}', stats["host"][key])
            for reason, key in HOST_REMOVAL_REASONS.items()
        ],
    )
    yield from _family(
        "disk_removed_records_total",
        "counter",
        "Records collected, by reason.",
        [
            (f'{{reason="{reason}"}}', stats["disk"].get(key, 0))
            for reason, key in sorted(REMOVAL_REASONS.items())
        ],
    )
    yield from _family(
        "recovery_seconds", "gauge", "Time that opening took.", [("", stats["recovery_s"])]
    )
    yield from _family(
        "put_refused_total",
        "counter",
        "Records refused, by reason.",
        [
            (f'{{reason="{key.removeprefix("refused_")}"}}', count)
            for key, count in sorted(stats["puts"].items())
            if key.startswith("refused_")
        ],
    )
    yield from _family(
        "put_bytes_by_class_total",
        "counter",
        "Bytes taken, by retention class.",
        _by_suffix(stats["puts"], "put_bytes_", "class"),
    )
    yield from _family(
        "load_records_total",
        "counter",
        "Records asked for by loads, by outcome.",
        [
            (f'{{status="{key.removeprefix("records_")}"}}', count)
            for key, count in sorted(stats["loads"].items())
            if key.startswith("records_")
        ],
    )
    for what in ("prompt_tokens", "hit_tokens"):
        yield from _family(
            f"namespace_{what}_total",
            "counter",
            "By namespace, under an opaque id.",
            [
                (f'{{namespace="{name}"}}', counts.get(what, 0))
                for name, counts in sorted(stats["namespaces"].items())
            ],
        )
    yield from _family(
        "health", "gauge", "1 = ok, 0 = degraded.", [("", int(stats["health"] == "ok"))]
    )
    yield from _timed(stats["timings"])
    yield from _further(stats)


def _rates(hits: Mapping[str, int]) -> Iterator[str]:
    """From the view of requests: of the tokens of all prompts, what was found."""
    asked = hits["prompt_tokens"] or 1
    yield from _family(
        "hit_ratio",
        "gauge",
        "Tokens found of tokens asked for.",
        [("", hits["hit_tokens"] / asked)],
    )
    by_tier = [(at, n / asked) for at, n in _by_suffix(hits, "hit_tokens_", "tier")]
    yield from _family("hit_ratio_by_tier", "gauge", "The same, by tier.", by_tier)


_TIMED = {
    "load": "Loads, by the tier that had the blocks.",
    "put": "Calls of put.",
    "write": "Writes of a tier's queue.",
}


def _timed(timings: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    for what, text in _TIMED.items():
        found = timings[what]
        yield from _histograms(f"{what}_seconds", text, "tier", found)
        sizes = [(f'{{tier="{tier}"}}', one["bytes"]) for tier, one in found.items()]
        yield from _family(f"{what}_bytes_total", "counter", text, sizes)


def _further(stats: Mapping[str, Any]) -> Iterator[str]:
    """Tiers below the directory, and the queues that write to them."""
    up = [(f'{{tier="{n}"}}', int(t["health"] != "down")) for n, t in stats["tiers"].items()]
    yield from _family("tier_up", "gauge", "0 while a tier is left alone.", up)
    values = [
        (f'{{tier="{name}",what="{what}"}}', value)
        for name, tier in stats["tiers"].items()
        for what, value in sorted(tier.items())
        if isinstance(value, int)
    ]
    yield from _family("tier_usage", "gauge", "What a tier says of itself.", values)
    waiting = [
        (f'{{tier="{name}"}}', queue["queued_bytes"])
        for name, queue in stats["lower_queues"].items()
    ]
    yield from _family("tier_queue_bytes", "gauge", "Bytes waiting for a tier.", waiting)
    failed = [
        (f'{{tier="{name}"}}', queue.get("failed_records", 0))
        for name, queue in stats["lower_queues"].items()
    ]
    yield from _family("tier_failed_records_total", "counter", "Records given up on.", failed)


def _by_suffix(values: Mapping[str, float], prefix: str, label: str) -> list[tuple[str, float]]:
    return [
        (f'{{{label}="{key.removeprefix(prefix)}"}}', count)
        for key, count in values.items()
        if key.startswith(prefix)
    ]


def _family(
    name: str, kind: Kind, text: str, samples: Iterable[tuple[str, float]]
) -> Iterator[str]:
    yield f"# HELP kvtier_{name} {text}"
    yield f"# TYPE kvtier_{name} {kind}"
    for labels, value in samples:
        yield f"kvtier_{name}{labels} {value}"


def _histograms(
    name: str, text: str, label: str, found: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    yield f"# HELP kvtier_{name} {text}"
    yield f"# TYPE kvtier_{name} histogram"
    for value, snapshot in found.items():
        at = f'{label}="{value}"'
        for bound, count in snapshot["buckets"]:
            yield f'kvtier_{name}_bucket{{{at},le="{bound}"}} {count}'
        yield f"kvtier_{name}_sum{{{at}}} {snapshot['sum']}"
        yield f"kvtier_{name}_count{{{at}}} {snapshot['count']}"
