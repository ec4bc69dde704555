"""Counters of a cache as Prometheus text (exposition format 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

Kind = Literal["counter", "gauge"]

# metric, type, help, section of stats(), key in it
_PLAIN: tuple[tuple[str, Kind, str, str, str], ...] = (
    ("matches_total", "counter", "Prefix lookups.", "hits", "matches"),
    ("prompt_tokens_total", "counter", "Tokens of looked-up prompts.", "hits", "prompt_tokens"),
    ("hit_blocks_total", "counter", "Blocks that lookups found.", "hits", "hit_blocks"),
    ("missed_blocks_total", "counter", "Blocks they did not find.", "hits", "missed_blocks"),
    ("state_hits_total", "counter", "Lookups that found a state slot.", "hits", "state_hits"),
    ("state_misses_total", "counter", "Lookups that found none.", "hits", "state_misses"),
    ("shared_reads_total", "counter", "Records another load read.", "loads", "shared_reads"),
    ("host_capacity_bytes", "gauge", "Size of the memory tier.", "host", "capacity_bytes"),
    ("host_block_bytes", "gauge", "Blocks in memory.", "host", "block_bytes"),
    ("host_state_bytes", "gauge", "State slots in memory.", "host", "state_bytes"),
    ("host_policy_failures_total", "counter", "Policies replaced.", "host", "policy_failures"),
    ("host_corrupt_total", "counter", "Records damaged in memory.", "host", "corrupt"),
    ("disk_entries", "gauge", "Records in the index.", "disk", "entries"),
    ("disk_index_bytes", "gauge", "Memory of the index.", "disk", "index_bytes"),
    ("disk_segments", "gauge", "Segment files.", "disk", "segments"),
    (
        "disk_write_breaker_open",
        "gauge",
        "1 while nothing is written to the disk.",
        "disk",
        "write_breaker_open",
    ),
    ("disk_breaker_open", "gauge", "1 while the disk is left alone.", "disk", "breaker_open"),
    ("disk_read_bytes_total", "counter", "Verified bytes read.", "disk", "read_bytes"),
    (
        "disk_written_payload_bytes_total",
        "counter",
        "Payload written by this process.",
        "disk",
        "written_payload_bytes",
    ),
    (
        "disk_written_file_bytes_total",
        "counter",
        "File bytes written by this process.",
        "disk",
        "written_file_bytes",
    ),
    ("disk_corrupt_total", "counter", "Records with a wrong checksum.", "disk", "corrupt"),
    ("disk_quarantined_total", "counter", "Slots never read again.", "disk", "quarantined"),
    ("disk_digest_mismatch_total", "counter", "Other records met.", "disk", "digest_mismatch"),
    ("disk_short_reads_total", "counter", "Reads that ended early.", "disk", "short_reads"),
    ("disk_read_errors_total", "counter", "Reads that failed.", "disk", "read_errors"),
    ("disk_gc_bytes_total", "counter", "Bytes collected.", "disk", "gc_bytes"),
    (
        "disk_gc_copied_bytes_total",
        "counter",
        "Rewritten while collecting.",
        "disk",
        "gc_copied_bytes",
    ),
    ("disk_spared_records_total", "counter", "Kept from eviction.", "disk", "gc_spared_records"),
    ("disk_gc_low_space_total", "counter", "Collections short of space.", "disk", "gc_low_space"),
    ("disk_low_space", "gauge", "1 while the file system is short.", "disk", "low_space"),
    ("disk_write_amplification", "gauge", "File per put byte.", "disk", "write_amplification"),
    (
        "disk_evicted_before_floor_total",
        "counter",
        "Records evicted younger than the floor.",
        "disk",
        "evicted_before_floor",
    ),
    ("io_fallbacks_total", "counter", "Segments opened without O_DIRECT.", "io", "fallbacks"),
    ("io_timeouts_total", "counter", "Requests 3FS did not answer in time.", "io", "timeouts"),
    (
        "l2_readback_ok_ratio",
        "gauge",
        "Of the written records that were read back as a test.",
        "readback",
        "l2_readback_ok_ratio",
    ),
    (
        "l2_readback_bad_total",
        "counter",
        "Of those, not as written.",
        "readback",
        "l2_readback_bad",
    ),
    ("l2_silent", "gauge", "1 = written to and asked, no hit for 10 min.", "readback", "l2_silent"),
    (
        "disk_expanded_bytes_total",
        "counter",
        "Bytes of compressed records read.",
        "disk",
        "expanded_bytes",
    ),
    ("disk_expand_seconds_total", "counter", "Time of expanding them.", "disk", "expand_s"),
    ("disk_codec_missing_total", "counter", "Not expandable here.", "disk", "codec_missing"),
    (
        "compression_bytes_before_total",
        "counter",
        "Bytes given to codecs.",
        "compression",
        "bytes_before",
    ),
    (
        "compression_bytes_after_total",
        "counter",
        "What was stored of them.",
        "compression",
        "bytes_after",
    ),
    ("compression_records_total", "counter", "Records compressed.", "compression", "records"),
    (
        "compression_plain_records_total",
        "counter",
        "Records that did not shrink.",
        "compression",
        "plain_records",
    ),
    ("compression_seconds_total", "counter", "Time of codecs.", "compression", "seconds"),
    ("queue_bytes", "gauge", "Bytes waiting for the directory.", "queue", "queued_bytes"),
    ("queue_failed_records_total", "counter", "Records given up on.", "queue", "failed_records"),
    (
        "queue_source_changed_total",
        "counter",
        "Sources changed too early.",
        "queue",
        "source_changed",
    ),
    ("queue_write_errors_total", "counter", "Writes that failed.", "queue", "write_errors"),
    ("approximate_share", "gauge", "Of the blocks put.", "replay", "approximate_share"),
    ("approximate_blocks_total", "counter", "Put as such.", "replay", "approximate_blocks"),
    ("window_dead_peers", "gauge", "Machines left alone now.", "windows", "dead_peers"),
    (
        "window_directory_records",
        "gauge",
        "Hints this machine keeps for all.",
        "windows",
        "directory_records",
    ),
    (
        "window_waiting_announcements",
        "gauge",
        "Changes the directory has not been told.",
        "windows",
        "waiting_announcements",
    ),
    ("leases_active", "gauge", "Matches that hold pins.", "leases", "active"),
    ("leases_expired_total", "counter", "Leases that ran out.", "leases", "expired"),
)

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


_WINDOW_GAUGES = ("dead_peers", "directory_records", "waiting_announcements")


def render(stats: Mapping[str, Any]) -> str:
    """`Cache.stats()` as Prometheus text; namespaces appear under their opaque id."""
    return "".join(f"{line}\n" for line in _lines(stats))


def _lines(stats: Mapping[str, Any]) -> Iterator[str]:
    for name, kind, text, section, key in _PLAIN:
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
