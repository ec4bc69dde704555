"""Several processes on one directory. Two caches in one process are as separate as two processes:
own writer, own lock, own index; the tests with real processes are in test_crash.py."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import numpy as np

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.testing import payload_of

STATE_BYTES = 9_001


def test_blocks_and_state_of_one_process_are_hits_in_the_other_at_once(store, make_model):
    with kvtier.open(store) as prefill, kvtier.open(store) as decode:
        a, b = make_model(prefill), make_model(decode)
        prompt = a.prompt(1, 5)
        assert b.block_hits(prompt) == 0
        a.store(prompt, states=(5,))
        prefill.flush()
        assert b.ns.match(prompt).n_blocks == 5
        # Decode continues the chain and publishes what it completes; the next prefill hits it.
        answer = np.concatenate((prompt[: 5 * 128], a.prompt(2, 3)))
        b.store(answer, first=5, states=(8,))
        decode.flush()
        match = a.ns.match(answer)
        assert match.n_blocks == 8
        assert match.state is not None
        assert match.state.tier == "disk"
        assert [(s.tier, s.count) for s in match.spans] == [("host", 5), ("disk", 3)]
        assert a.load_all(answer) == (8, 8)


def test_a_block_stored_by_both_is_kept_once_in_the_index(store, make_model):
    with kvtier.open(store) as one, kvtier.open(store) as two:
        a, b = make_model(one), make_model(two)
        tokens = a.prompt(1, 4)
        a.store(tokens)
        b.store(tokens)
        one.flush()
        two.flush()
        assert a.load_all(tokens) == b.load_all(tokens) == (4, 4)
    with kvtier.open(store, read_only=True) as cache:
        assert cache.stats()["disk"]["entries"] == 4


def test_a_second_copy_takes_over_when_the_first_one_goes(store, make_model):
    """Three processes may know different copies of one record; collecting one hurts nobody."""
    with kvtier.open(store) as one, kvtier.open(store) as two:
        a, b = make_model(one), make_model(two)
        tokens = a.prompt(1, 3)
        a.store(tokens)
        b.store(tokens)
        one.flush()
        two.flush()
    paths = sorted(store.rglob("*.kvs"))
    assert len(paths) == 2
    for path in paths:
        with kvtier.open(store, read_only=True, host_bytes=0) as cache:
            model = make_model(cache)
            kept = path.read_bytes()
            assert model.load_all(tokens) == (3, 3)
            path.unlink()
            cache.disk.segments.close()
            model.load_all(tokens)
            assert model.load_all(tokens) == (3, 3)
            path.write_bytes(kept)


def test_collection_keeps_second_copies_until_their_time_is_over(store, make_model):
    with kvtier.open(store) as one, kvtier.open(store) as two:
        a, b = make_model(one), make_model(two)
        tokens = a.prompt(1, 3)
        a.store(tokens)
        b.store(tokens)
        one.flush()
        two.flush()
    with kvtier.open(store) as cache:
        assert cache.gc().records_removed == 0
    assert len(list(store.rglob("*.kvs"))) == 2


def test_what_another_process_stored_is_not_written_again(store, make_model):
    with kvtier.open(store) as one, kvtier.open(store) as two:
        a, b = make_model(one), make_model(two)
        tokens = a.prompt(1, 4)
        a.store(tokens, durability="flushed").wait(60)
        assert b.block_hits(tokens) == 4
        assert b.store(tokens, durability="flushed").stored == (True,) * 4
        two.flush()
        assert two.stats()["disk"]["written_payload_bytes"] == 0


def test_tenants_share_a_directory_and_see_nothing_of_each_other(store, make_model):
    with kvtier.open(store) as cache:
        alice, bob = make_model(cache, salt="alice"), make_model(cache, salt="bob")
        tokens = alice.prompt(1, 3)
        alice.store(tokens, durability="flushed").wait(60)
        assert alice.block_hits(tokens) == 3
        assert bob.block_hits(tokens) == 0
        assert not set(alice.digests(tokens)) & set(bob.digests(tokens))


def test_two_layouts_in_one_directory_never_mix(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        tokens = model.prompt(1, 3)
        model.store(tokens, durability="flushed").wait(60)
        wider = kvtier.LayoutSpec(128, {"block": kvtier.parts(("kv", 7_000))})
        ns = cache.namespace(wider, model="model", salt="tenant")
        assert ns.match(tokens).n_blocks == 0
        digests = ns.match(tokens).digests
        ns.put(digests, [payload_of(d, 7_000) for d in digests], durability="flushed").wait(60)
        assert ns.match(tokens).n_blocks == 3
        assert model.load_all(tokens) == (3, 3)


def test_an_orderly_end_leaves_no_empty_folders(store, make_model):
    for _ in range(3):
        with kvtier.open(store) as cache:
            make_model(cache).block_hits([1] * 300)
    assert list((store / "w").iterdir()) == []


READER = textwrap.dedent(
    """
    import sys
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.testing import payload_of

    layout = kvtier.LayoutSpec(
        128,
        {"block": kvtier.parts(("index", 1000), ("main", 4000)),
         "state": kvtier.parts(("swa", 9001))},
    )
    with kvtier.open(sys.argv[1]) as cache:
        ns = cache.namespace(layout, model="model", salt="tenant")
        print("ready", flush=True)
        for line in sys.stdin:
            tokens = np.random.default_rng(int(line)).integers(0, 1 << 20, 4 * 128 + 5)
            match = ns.match(tokens)
            rooms = np.zeros((match.n_blocks, 5000), np.uint8)
            result = ns.load(match, dst=rooms).wait()
            good = all(
                np.array_equal(room, payload_of(d, 5000))
                for room, d in zip(rooms, match.digests)
            )
            longer = np.concatenate((tokens[: 4 * 128], tokens[:133]))
            digests = ns.match(longer).digests
            ns.put([digests[4]], payload_of(digests[4], 5000), parents=digests[3], first_block=4)
            cache.flush()
            print(match.n_blocks, result.ok, good, flush=True)
    """
)


def test_a_real_second_process_reads_and_extends_while_this_one_writes(store, make_model):
    with kvtier.open(store) as cache:
        model = make_model(cache)
        process = subprocess.Popen(
            [sys.executable, "-c", READER, str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for seed in range(10):
            tokens = model.prompt(seed, 4)
            model.store(tokens, states=(4,))
            cache.flush()
            process.stdin.write(f"{seed}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "4 True True\n"
            longer = np.concatenate((tokens[: 4 * 128], tokens[:133]))
            assert model.load_all(longer) == (5, 5)
        process.stdin.close()
        assert process.wait(30) == 0
        process.stdout.close()


def test_what_another_process_dropped_is_stored_anew_when_it_is_put_again(store, make_model):
    with kvtier.open(store) as ours, kvtier.open(store) as other:
        model, neighbour = make_model(ours), make_model(other)
        tokens = model.prompt(77, 3)
        assert model.store(tokens, durability="flushed").wait(60)
        assert neighbour.block_hits(tokens) == 3
        neighbour.ns.drop(neighbour.digests(tokens))
        time.sleep(0.002)  # between processes, order is known to the millisecond
        assert model.store(tokens, durability="flushed").wait(60)
        assert neighbour.block_hits(tokens) == 3


def test_a_tombstone_that_is_read_late_spares_what_was_stored_after_it(store, make_model):
    with kvtier.open(store) as ours, kvtier.open(store) as other:
        model, neighbour = make_model(ours), make_model(other)
        tokens = model.prompt(78, 3)
        neighbour.ns.drop(neighbour.digests(tokens))
        time.sleep(0.002)
        assert model.store(tokens, durability="flushed").wait(60)
        ours.gc()  # reads the tombstones only now
        assert model.block_hits(tokens) == 3
        assert neighbour.block_hits(tokens) == 3
        assert neighbour.ns.drop(neighbour.digests(tokens)) == 3
        ours.gc()
        assert model.block_hits(tokens) == 0
