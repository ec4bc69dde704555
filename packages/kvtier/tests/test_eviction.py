"""Policies by their interface alone, then at work in host memory."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.host.eviction import Use
from deepinfer_kvtier.host.policies import ONLINE, make_policy
from deepinfer_kvtier.host.session_policy import SessionAware
from deepinfer_kvtier.simulation.replay import BLOCK_BYTES, ReplayClock, replay
from deepinfer_kvtier.simulation.simulate import simulate
from deepinfer_kvtier.simulation.stretch import StretchLoad, generate
from deepinfer_kvtier.simulation.trace import Request


def chain_of(path: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Names as digests are: each says everything before it."""
    return tuple(path[: i + 1] for i in range(len(path)))


def ask(policy, path, at_s: float, *, block_tokens: int = 128) -> None:
    chain = chain_of(path)
    policy.used(Use(chain, 0, len(chain) * block_tokens + 1, block_tokens, at_s))


def enter(policy, path, first: int = 0, at_s: float = 0.0) -> None:
    names = chain_of(path)
    policy.entered(names[first:], [name[:-1] for name in names[first:]], at_s)


def drain(policy) -> list[tuple[int, ...]]:
    """All victims in order, until there is none."""
    victims = []
    while (victim := policy.victim(lambda name: False)) is not None:
        policy.left(victim)
        victims.append(victim)
    return victims


PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), PATHS, st.floats(0, 90)),
        st.tuples(st.just("enter"), PATHS, st.integers(0, 5)),
        st.tuples(st.just("drop"), PATHS, st.none()),
        st.tuples(st.just("evict"), st.sets(st.integers(0, 2)), st.none()),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", ONLINE)
@given(OPERATIONS)
def test_a_victim_is_held_and_free_and_everything_held_becomes_one(name, operations):
    policy, held, now = make_policy(name), set(), 0.0
    for what, value, extra in operations:
        if what == "ask":
            now += extra
            ask(policy, value, now)
        elif what == "enter":
            new = [n for n in chain_of(value)[extra:] if n not in held]
            policy.entered(new, [n[:-1] for n in new], now)
            held.update(new)
        elif what == "drop":
            if value in held:
                held.remove(value)
                policy.left(value)
        else:
            pinned = {n for n in held if n[0] in value}
            victim = policy.victim(pinned.__contains__)
            if victim is None:
                assert held == pinned
            else:
                assert victim in held - pinned
                held.remove(victim)
                policy.left(victim)
    assert sorted(drain(policy)) == sorted(held)


@pytest.mark.parametrize("name", ["tail-lru", "session"])
def test_a_chain_that_was_hit_and_continued_loses_its_deepest_block_first(name):
    policy = make_policy(name)
    ask(policy, (1, 2, 3), 0.0)
    enter(policy, (1, 2, 3))
    ask(policy, (1, 2, 3, 4, 5), 9.0)
    enter(policy, (1, 2, 3, 4, 5), first=3)
    enter(policy, (1, 2, 3, 4, 5, 6), first=5)  # decoded later, asked for by nobody
    assert [len(victim) for victim in drain(policy)] == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("name", ["tail-lru", "session"])
def test_what_others_have_leased_is_not_looked_at_for_every_victim(name):
    policy, leased = make_policy(name), range(40)
    for number in range(80):
        ask(policy, (number, *range(100)), 0.01 * number)
        enter(policy, (number, *range(100)))
    looked = 0

    def pinned(block) -> bool:
        nonlocal looked
        looked += 1
        return block[0] in leased

    for _ in range(40 * 101):
        policy.left(policy.victim(pinned))
    assert looked < 40 * 101 + 40 * 10
    assert policy.victim(pinned) is None
    assert policy.victim(lambda block: len(block) != 50) is not None, "one in the middle is found"


@pytest.mark.parametrize("name", ["tail-lru", "session"])
def test_what_was_evicted_and_comes_back_can_leave_again(name):
    policy = make_policy(name)
    ask(policy, (1, 2, 3), 0.0)
    enter(policy, (1, 2, 3))
    drain(policy)
    enter(policy, (1, 2, 3))
    assert [len(victim) for victim in drain(policy)] == [3, 2, 1]


@pytest.mark.parametrize("name", ONLINE)
def test_prompts_that_are_asked_for_and_never_stored_take_bounded_memory(name):
    policy = make_policy(name)
    for number in range(3_000):
        ask(policy, (number, *range(20)), float(number))
    assert getattr(policy, "remembered", 0) < 17_000


def test_prompts_too_short_to_be_a_conversation_are_counted_and_bounded():
    """Their one block belongs to the next who asks; what they wait for never comes."""
    policy = SessionAware()
    for number in range(6_000):
        ask(policy, (7,), 10.0 * number)
    assert (policy.remembered, policy.waiting) == (1, 4_097)


def test_looking_a_prompt_up_again_at_once_teaches_nothing():
    """A scheduler may ask several times for one request."""
    once, often = SessionAware(), SessionAware()
    for number in range(400):
        path, now = (number, *range(10)), 40.0 * number
        ask(once, path, now)
        for again in range(3):
            ask(often, path, now + 0.1 * again)
    for policy in (once, often):
        enter(policy, (-1, 1), at_s=16_000.0)
        ask(policy, (-2, *range(10)), 16_000.0)
        enter(policy, (-2, *range(10)))
        ask(policy, (-3, *range(10)), 16_100.0)
        enter(policy, (-3, *range(10)))
    assert drain(once) == drain(often)


def test_a_policy_learns_which_conversations_go_on():
    """Long first prompts always come back after a minute, short ones never."""
    policy, now = SessionAware(), 0.0
    for number in range(600):
        now += 30.0
        ask(policy, (number, 0), now)
        ask(policy, (number, *range(1, 30)), now)
        ask(policy, (number - 2, *range(1, 31)), now)
    short, long = (-1, 0), (-2, *range(1, 30))
    ask(policy, long, now)
    enter(policy, long)
    ask(policy, short, now + 20)
    enter(policy, short)
    victims = drain(policy)
    assert victims[0][0] == -1, "the younger one, which nobody will continue"


# -- in host memory


def load() -> list[Request]:
    return generate(StretchLoad(days=0.25, sessions_per_day=1_200))


@pytest.mark.parametrize("policy", ONLINE)
@pytest.mark.parametrize("capacity", [pytest.param(150, marks=pytest.mark.slow), 800])
def test_the_real_cache_hits_exactly_what_the_simulator_says(policy, capacity):
    requests, clock = load(), ReplayClock()
    with kvtier.open(host_bytes=capacity * BLOCK_BYTES, host_policy=policy, clock=clock) as cache:
        served = replay(cache, clock, requests)
        cache.host.audit()
        host = cache.stats()["host"]
    simulated = simulate(requests, capacity_blocks=capacity, policy=policy, as_host=True)
    assert served.hit_tokens == simulated.hit_tokens > 0
    assert host["evicted"] == simulated.evicted_blocks > 0
    assert host["policy_failures"] == 0


def test_what_knows_the_future_is_an_upper_bound_in_host_memory_too():
    requests = load()
    hits = {
        policy: simulate(requests, capacity_blocks=150, policy=policy, as_host=True).hit_tokens
        for policy in (*ONLINE, "oracle")
    }
    assert max(hits, key=hits.__getitem__) == "oracle"


class Newest:
    """Somebody's own policy: the youngest block leaves."""

    def __init__(self) -> None:
        self.names: list[bytes] = []

    def used(self, use: kvtier.Use) -> None:
        pass

    def entered(self, names, parents, at_s) -> None:
        self.names.extend(names)

    def left(self, name) -> None:
        self.names.remove(name)

    def victim(self, pinned):
        return next((name for name in reversed(self.names) if not pinned(name)), None)


@pytest.mark.parametrize(
    "own", [Newest, Newest(), lambda: Newest()], ids=["class", "object", "call"]
)
def test_a_policy_of_ones_own_decides(make_model, own):
    with kvtier.open(host_bytes=10 * 5_000, host_policy=own) as cache:
        model = make_model(cache)
        for seed in range(3):
            model.store(model.prompt(seed, 5))
        assert [model.block_hits(model.prompt(seed, 5)) for seed in range(3)] == [5, 0, 5]
        assert cache.stats()["host"]["policy"] == "Newest"


def test_a_policy_of_ones_own_is_named_by_module_and_class(tmp_path, monkeypatch, cli):
    (tmp_path / "my_policies.py").write_text(
        "from deepinfer_kvtier.host.eviction import TailLru as Mine\nnumber = 3\n"
        "class Half:\n    def used(self, use): pass\n"
        "class Greedy:\n    def __init__(self, room): pass\n"
        "class Lazy(Mine):\n    def victim(self, pinned): return None\n"
    )
    (tmp_path / "wrong_syntax.py").write_text("def\n")
    monkeypatch.syspath_prepend(tmp_path)
    kvtier.open(host_policy="my_policies:Mine").close()
    for wrong, why in {
        "my_policies:Half": "lacks",
        "my_policies:number": "no class",
        "my_policies:None_": "cannot load",
        "my_policies:Greedy": "makes no policy",
        "wrong_syntax:Mine": "cannot load",
        "nowhere:Mine": "cannot load",
        "newest": "unknown policy",
    }.items():
        with pytest.raises(kvtier.ConfigError, match=why):
            kvtier.open(host_policy=wrong)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1024, "hash_ids": [1, 2]}\n')
    simulate_it = ("simulate", "--trace", trace, "--capacity", "1", "--policy")
    assert "my_policies:Mine" in cli.run(*simulate_it, "my_policies:Mine").stdout
    failed = cli.run(*simulate_it, "my_policies:Lazy")
    assert (failed.returncode, len(failed.stderr.splitlines())) == (2, 1)
    assert "named no victim" in failed.stderr


class Broken(Newest):
    """Does one thing wrong, at its 12th call."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def fails(self, where: str) -> bool:
        self.calls += 1
        return self.calls >= 12 and self.fault == where

    def used(self, use) -> None:
        if self.fails("used"):
            raise ZeroDivisionError

    def entered(self, names, parents, at_s) -> None:
        if self.fails("entered"):
            raise ZeroDivisionError
        super().entered(names, parents, at_s)

    def left(self, name) -> None:
        if self.fails("left"):
            raise ZeroDivisionError
        super().left(name)

    def victim(self, pinned):
        if self.fails("raises"):
            raise ZeroDivisionError
        if self.fails("pinned"):
            return next((name for name in self.names if pinned(name)), self.names[0])
        if self.fails("unknown"):
            return b"?" * 32
        return None if self.fails("none") else super().victim(pinned)


@pytest.mark.parametrize(
    "fault", ["used", "entered", "left", "raises", "pinned", "unknown", "none"]
)
def test_a_policy_that_fails_costs_hits_and_nothing_else(make_model, caplog, fault):
    with kvtier.open(host_bytes=12 * 5_000, host_policy=lambda: Broken(fault)) as cache:
        model = make_model(cache)
        kept = model.prompt(99, 2)
        model.store(kept)
        with model.ns.match(kept, want=("block",)) as lease, caplog.at_level(logging.ERROR):
            for seed in range(30):
                model.store(model.prompt(seed, 4))
                hits, right = model.load_all(model.prompt(seed, 4))
                assert hits == right == 4
                cache.host.audit()
            room = np.zeros((2, 5_000), np.uint8)
            assert model.check(lease, model.ns.load(lease, dst=room, wait=True).wait(), room) == 2
        assert cache.stats()["host"]["policy_failures"] == 1
        assert sum("tail-first LRU takes its place" in text for text in caplog.messages) == 1
