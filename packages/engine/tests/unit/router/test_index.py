"""What the router knows of the caches of its workers, and what it does with it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import BLOCK, ask, cluster, greedy, patient, prompt, request, run, until

from deepinfer_engine.adapters.kvtier import open_store
from deepinfer_engine.core.block_hashes import block_hashes, pack_hashes, unpack_hashes
from deepinfer_engine.core.pictures import Picture
from deepinfer_engine.errors import EngineUnavailable
from deepinfer_engine.kv.memory import MemoryStore
from deepinfer_engine.pd.cache_feed import CacheFeed
from deepinfer_engine.pd.wire import FrameType
from deepinfer_engine.router.index import Overlap, PrefixIndex
from deepinfer_engine.router.scoring import PrefillChoice
from deepinfer_engine.router.work import Work


def hashes(tokens, salt="s", **more):
    return block_hashes(tokens, salt, BLOCK, "layout", **more)


def test_a_block_is_named_by_all_that_comes_before_it():
    one, two = prompt(1, 40), (*prompt(1, 16), *prompt(2, 24))
    assert hashes(one)[:2] == hashes(two)[:2]
    assert not set(hashes(one)[2:]) & set(hashes(two)[2:])
    assert hashes(one[:15]) == hashes(one)[:1]
    assert not set(hashes(one)) & set(hashes(one, salt="t")), "I-48: a salt is another chain"
    assert unpack_hashes(pack_hashes(hashes(one))) == tuple(hashes(one))
    with pytest.raises(ValueError, match="9 bytes"):
        unpack_hashes(b"x" * 9)


def test_a_picture_is_part_of_every_block_that_it_reaches():
    tokens = prompt(1, 40)

    def shown(digest):
        return hashes(tokens, pictures=(Picture(10, 4, 1, 1, digest, b"abc"),))

    a, b = shown(b"a" * 32), shown(b"b" * 32)
    assert a[0] == b[0] == hashes(tokens)[0]
    assert not set(a[1:]) & set(b[1:])


BLOCKS = st.lists(st.integers(0, 12), max_size=12)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed", "clear", "leave", "join"]),
        st.integers(0, 4),
        st.sampled_from(["memory", "below"]),
        BLOCKS,
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(changes=CHANGES, chain=st.lists(st.integers(0, 12), max_size=8, unique=True))
def test_the_index_says_what_a_plain_book_says(changes, chain):
    """Workers 0 and 1 share a store, the others have their own. All are there at the beginning."""
    stores = ["s", "s", "", "t", ""]
    index, book = PrefixIndex(), {}
    arrivals = [("join", worker, "memory", ()) for worker in range(len(stores))]
    for what, worker, tier, blocks in [*arrivals, *changes]:
        if what == "join":
            index.join(worker, stores[worker])
            book[worker] = {"memory": set(), "below": set()}
        elif worker not in book:
            index.leave(worker)
        elif what == "leave":
            index.leave(worker)
            del book[worker]
        elif what == "clear":
            index.clear(worker)
            book[worker] = {"memory": set(), "below": set()}
        else:
            getattr(index, what)(worker, tier, blocks)
            change = (
                book[worker][tier].update
                if what == "stored"
                else book[worker][tier].difference_update
            )
            change(blocks)
    expected = {}
    for worker, held in book.items():
        mates = [w for w in book if w == worker or (stores[w] and stores[w] == stores[worker])]
        anywhere = held["memory"] | held["below"] | set().union(*(book[w]["below"] for w in mates))

        def leading(blocks):
            return next((i for i, b in enumerate(chain) if b not in blocks), len(chain))

        if leading(anywhere):
            expected[worker] = Overlap(leading(held["memory"]), leading(anywhere))
    assert dict(index.overlaps(chain)) == expected
    for worker in list(book):
        index.leave(worker)
    assert len(index) == 0


class Router:
    """One end of a feed, which may lose messages."""

    def __init__(self):
        self.index, self.sent, self.lose, self.last = PrefixIndex(), [], False, 0
        self.index.join("w")

    def send(self, kind, body):
        assert kind is FrameType.CACHE
        if not self.lose:
            self.sent.append(body)


def test_a_router_that_comes_late_hears_everything_and_changes_come_in_order():
    from deepinfer_engine.core.block_hashes import CacheChange

    async def body():
        feed, early, late = CacheFeed(), Router(), Router()
        feed.joined(early)
        feed.changed(CacheChange(True, "memory", (1, 2, 3)))
        feed.changed(CacheChange(False, "memory", (2,)))
        feed.changed(CacheChange(True, "memory", (1,)))
        await until(lambda: len(early.sent) == 2)
        feed.joined(late)
        feed.changed(CacheChange(True, "below", (9,)))
        await until(lambda: len(early.sent) == 3)
        assert [m["number"] for m in early.sent] == [1, 2, 3]
        assert [m["whole"] for m in early.sent] == [True, False, False]
        assert set(unpack_hashes(early.sent[1]["memory"])) == {1, 3}
        assert unpack_hashes(early.sent[1]["no_memory"]) == (2,)
        assert (late.sent[0]["whole"], set(unpack_hashes(late.sent[0]["memory"]))) == (True, {1, 3})
        feed.left(early)
        feed.changed(CacheChange(True, "below", (10,)))
        await until(lambda: len(late.sent) == 3)
        assert len(early.sent) == 3

    run(body())


@pytest.mark.parametrize("kind", ["memory", "kvtier"])
def test_the_next_turn_goes_where_the_last_one_was_computed(kind, tmp_path):
    """Each worker has a cache of its own; what one wrote the router hears from it."""
    numbers = iter(range(9))

    def store(runner):
        if kind == "memory":
            return MemoryStore(runner.layout)
        return open_store(patient(tmp_path / str(next(numbers))), runner.layout)

    async def body():
        async with cluster(prefills=3, store=store) as it:
            index = it.engine._index
            for conversation in range(6):
                tokens, before = list(prompt(conversation, 6 * BLOCK + 1)), 0
                for turn in range(3):
                    name = f"c{conversation}t{turn}"
                    answer = await ask(it.engine, request(name, tokens, greedy(4)))
                    whole = (len(tokens) - 1) // BLOCK * BLOCK
                    assert answer.cached >= before, "it was computed elsewhere"
                    before = whole
                    layout = it.prefills[0].service.runner.layout
                    chain = block_hashes(tokens, "anonymous", BLOCK, layout.layout_hash)
                    count = len(tokens) // BLOCK
                    await until(lambda: any(
                        o.whole >= count for w, o in index.overlaps(chain).items()  # noqa: B023
                        if w.role == "prefill"))  # fmt: skip
                    tokens += [*answer.tokens, *prompt(turn, BLOCK)]
            await until(it.idle)
            gone = it.prefills.pop()
            await gone.kill()
            await until(lambda: not any(
                w.address == gone.address for w in index.overlaps(chain)))  # fmt: skip

    run(body())


def test_a_message_that_was_missed_makes_the_worker_unknown_until_it_told_all():
    async def body():
        async with cluster(store=lambda runner: MemoryStore(runner.layout)) as it:
            tokens = prompt(1, 6 * BLOCK)
            await ask(it.engine, request("a", tokens))
            (link,) = [x for x in it.engine._links.values() if x.role == "prefill"]
            layout = it.prefills[0].service.runner.layout
            chain = block_hashes(tokens, "anonymous", BLOCK, layout.layout_hash)

            def known():
                return it.engine._index.overlaps(chain).get(link, Overlap()).whole

            await until(lambda: known() == 6)
            link._told -= 1  # as if one had been lost on the way
            await ask(it.engine, request("b", prompt(2, 6 * BLOCK)))
            await until(lambda: known() == 6)
            assert link._told >= 1

    run(body())


@dataclass(eq=False)
class Link:
    """What a choice looks at."""

    address: str
    info: object
    work: Work


def links(index, rates):
    """Workers with so many prompt tokens a second, in the index."""
    info, made = SimpleNamespace(block_tokens=BLOCK, layout_hash="layout"), []
    for i, rate in enumerate(rates):
        made.append(Link(f"10.0.0.{i}:9000", info, Work(lambda: 0.0)))
        made[-1].work.rate = rate
        index.join(made[-1])
    return made


def test_a_block_that_ends_with_the_prompt_is_no_hit():
    """The last token is always computed, and with it the block that it is in."""
    index = PrefixIndex()
    holder, _ = links(index, [1000.0, 1000.0])
    tokens = prompt(1, 3 * BLOCK)
    index.stored(holder, "memory", hashes(tokens))
    whole = PrefillChoice(index).choose(request("r", tokens, salt="s"), [holder])
    longer = PrefillChoice(index).choose(request("r", (*tokens, 1), salt="s"), [holder])
    assert whole.ttft_ms - longer.ttft_ms == pytest.approx(BLOCK - 1, rel=0.05)  # 1 ms a token


def test_an_answer_that_goes_on_is_not_sent_away_for_its_wait():
    index = PrefixIndex()
    (link,) = links(index, [1000.0])
    link.work.begin(60_000.0)
    choice = PrefillChoice(index, ttft_shed_s=1.0)
    fresh = request("r", prompt(1, 20))
    with pytest.raises(EngineUnavailable, match="would take"):
        choice.choose(fresh, [link])
    assert choice.choose(replace(fresh, resumed=3), [link]).address == link.address


@pytest.mark.parametrize(
    ("limits", "waits_ms", "taken"),
    [
        ({"ttft_target_s": 1.0}, 1500.0, True),
        ({"ttft_target_s": 1.0}, 2500.0, False),
        ({"ttft_target_s": 1.0, "ttft_shed_s": 3.0}, 2500.0, True),
        ({}, 60_000.0, True),
    ],
)
def test_what_would_take_twice_the_target_is_sent_away(limits, waits_ms, taken):
    index = PrefixIndex()
    (link,) = links(index, [1000.0])
    link.work.begin(waits_ms)
    choice = PrefillChoice(index, **limits)
    if taken:
        assert choice.choose(request("r", prompt(1, 20)), [link]).worker is link
    else:
        with pytest.raises(EngineUnavailable, match="would take"):
            choice.choose(request("r", prompt(1, 20)), [link])


def test_a_target_takes_the_cached_worker_that_is_in_time_and_the_other_where_it_is_not():
    def chosen(target):
        index = PrefixIndex()
        holder, other = links(index, [1000.0, 1000.0])
        tokens = prompt(1, 40 * BLOCK + 3)
        index.stored(holder, "memory", hashes(tokens))
        for link in (holder, other):
            link.work.begin(2000.0).end()  # both had as much to do lately
        holder.work.begin(700.0)
        other.work.begin(1.0)
        best = PrefillChoice(index, 60.0, target).choose(
            request("r", tokens, salt="s"), [holder, other]
        )
        return "holder" if best.worker is holder else "other"

    assert (chosen(2.0), chosen(0.5), chosen(None)) == ("holder", "other", "other")


def test_what_is_evicted_is_told():
    async def body():
        def store(runner):
            size = runner.layout.block_bytes + runner.layout.state_bytes
            return MemoryStore(runner.layout, limit_bytes=8 * size)

        async with cluster(store=store) as it:
            (link,) = [x for x in it.engine._links.values() if x.role == "prefill"]
            layout = it.prefills[0].service.runner.layout
            chains = []
            for n in range(6):
                tokens = prompt(n, 4 * BLOCK)
                chains.append(block_hashes(tokens, "anonymous", BLOCK, layout.layout_hash))
                await ask(it.engine, request(f"r{n}", tokens))

            def held():
                return [it.engine._index.overlaps(c).get(link, Overlap()).whole for c in chains]

            await until(lambda: held()[-1] == 4 and held()[0] == 0)
            assert sum(held()) <= 16

    run(body())


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_worker_shows_its_rate_and_its_queue_goes_back_to_nothing():
    clock = Clock()
    work = Work(clock)
    first, second = work.begin(100.0), work.begin(50.0)
    assert work.queue_ms == 150
    clock.now = 0.5
    first.end(1000)
    assert work.rate == 2000
    clock.now = 1.0  # the second one waited for the first: half a second is its own
    second.end(1000)
    second.end(1)
    assert (work.rate, work.queue_ms) == (2000, 0)
    assert 0 < work.load <= 150
    clock.now += 3600
    assert work.load < 1e-9
    costs = [work.cost_ms(*row, 2000) for row in ((2000, 0, 0), (0, 0, 2000), (0, 2000, 0))]
    assert costs == sorted(costs, reverse=True)


def test_lookups_cost_the_chain_and_not_the_fleet():
    """Counted, not timed: one dict lookup a block and tier for all of 64 workers together."""
    index, chance = PrefixIndex(), random.Random(1)
    chain = [chance.getrandbits(64) for _ in range(601)]
    for worker in range(64):
        index.join(worker)
        index.stored(worker, "memory", chain[: 9 * worker])
    lookups = 0

    class Counted(dict):
        def get(self, *args):
            nonlocal lookups
            lookups += 1
            return super().get(*args)

    index._tables = {tier: Counted(table) for tier, table in index._tables.items()}
    found = index.overlaps(chain)
    assert lookups <= 3 * 601
    assert {w: o.whole for w, o in found.items()} == {w: 9 * w for w in range(1, 64)}
