"""What routers and operators are told."""

from __future__ import annotations

import deepinfer_kvtier as kvtier

BLOCK_BYTES = 5_000


def test_events_tell_what_came_and_what_left(cache, model):
    queue = kvtier.EventQueue()
    unsubscribe = cache.subscribe(queue)
    tokens = model.prompt(1, 2)
    digests = model.digests(tokens)
    model.store(tokens, durability="flushed").wait(60)
    cache.flush()
    stored = queue.drain()
    assert {(e.what, e.tier, e.key, e.n_blocks) for e in stored} == {
        ("stored", tier, digest[:16], i + 1)
        for tier in ("host", "disk")
        for i, digest in enumerate(digests)
    }
    assert stored[0].parent == model.ns.root[:16]
    model.ns.drop(digests[1:])
    assert {(e.what, e.tier, e.key) for e in queue.drain()} == {
        ("removed", tier, digests[1][:16]) for tier in ("host", "disk")
    }
    unsubscribe()
    model.store(model.prompt(2, 1))
    assert queue.drain() == []


def test_a_router_that_follows_the_events_knows_what_each_tier_holds(store, make_model):
    """Evictions, drops and what loads bring back into memory: nothing changes silently."""
    room = 6 * BLOCK_BYTES
    with kvtier.open(store, host_bytes=room) as cache:
        model = make_model(cache)
        queue = kvtier.EventQueue()
        cache.subscribe(queue)
        held: dict[str, set[bytes]] = {"host": set(), "disk": set()}

        def follow() -> None:
            for event in queue.drain():
                known = held[event.tier]
                if event.what == "stored":
                    known.add(event.key)
                else:
                    known.remove(event.key)
            in_memory = {d[:16] for d in everything if cache.host.contains(0, d)}
            assert held["host"] == in_memory

        prompts = [model.prompt(seed, 4) for seed in range(3)]
        everything = [d for tokens in prompts for d in model.digests(tokens)]
        for tokens in prompts:
            model.store(tokens, durability="flushed").wait(60)
            follow()
        assert len(held["host"]) < len(everything)
        for tokens in prompts:
            model.load_all(tokens)
            follow()
        model.ns.drop(model.digests(prompts[1])[2:])
        follow()
        assert held["disk"] == {d[:16] for d in everything} - {
            d[:16] for d in model.digests(prompts[1])[2:]
        }
        assert queue.lost == 0


def test_a_listener_that_raises_hurts_nobody(cache, model):
    def broken(event: kvtier.KVEvent) -> None:
        raise RuntimeError("listener")

    queue = kvtier.EventQueue(capacity=1)
    cache.subscribe(broken)
    cache.subscribe(queue)
    model.store(model.prompt(1, 3), durability="flushed").wait(60)
    cache.flush()
    assert cache.stats()["events"]["failed_callbacks"] == 6
    assert queue.lost == 5


def test_hit_rate_is_counted_in_tokens_from_the_view_of_requests(cache, model):
    tokens = model.prompt(1, 4, tail=0)
    model.store(tokens)
    model.block_hits(tokens)
    hits = cache.stats()["hits"]
    assert (hits["matches"], hits["prompt_tokens"], hits["hit_tokens"]) == (1, 512, 384)
    assert hits["hit_tokens_host"] == 384
