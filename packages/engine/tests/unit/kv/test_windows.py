"""Window states through the whole engine on the toy runner: kept, found, pulled and rebuilt.

The toy computes every token from the bytes of blocks and state alone: text that is right was
continued from the right bytes.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from toy_engine import BLOCK, alone, ask, cluster, greedy, patient, prompt, request, run, toy, until

from deepinfer_engine.adapters.kvtier import WindowExchange, open_store
from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.router.local import LocalEngine

LONG = greedy(40, ignore_eos=True)
TOKENS = prompt(1, 12 * BLOCK + 3)
EXCHANGE = WindowExchange(bytes(32), deadline_s=5.0)
EXACT_REPLAY = toy().caps.exact_replay


def settings(path: Path | None, mode="exact", **changes):
    return replace(patient(path), recovery=toy().caps.recovery(mode), **changes)


def talk(where, *requests, persist="last", sampling=LONG):
    """Answers of a new engine on these settings, then its counters."""
    told = []

    async def body():
        runner = toy()
        engine = LocalEngine(
            runner,
            store=open_store(where, runner.layout),
            config=EngineConfig(persist_state=persist),
        )
        for i, one in enumerate(requests):
            options = one if isinstance(one, dict) else {"tokens": one}
            tokens = options.pop("tokens")
            told.append(await ask(engine, request(f"r{i}", tokens, sampling, **options)))
        await engine.flush()
        (status,) = await engine.status()
        told.append(status.counters)
        await engine.close()

    run(body())
    return told


@pytest.mark.parametrize(("persist", "states"), [("last", 2), ("none", 0), ("all", 17)])
def test_what_of_a_request_goes_below_memory(tmp_path, persist, states):
    """12 borders of the prompt, and 5 that the answer passes."""
    answer, counters = talk(settings(tmp_path), TOKENS, persist=persist)
    assert answer.tokens == alone(TOKENS, LONG)
    assert counters["windows_kept"] >= 17, "all of them stay in memory"
    assert counters["prefix_put_states"] == states
    assert counters["prefix_put_blocks"] == (len(TOKENS) + 39) // BLOCK


@pytest.mark.parametrize(
    ("persist", "mode", "window"),
    [
        ("last", "exact", "stored"),
        ("all", "exact", "stored"),
        ("none", "exact", "exact_replay"),
        ("none", "none", "miss"),
    ],
)
def test_the_next_turn_after_a_restart_says_what_the_whole_would_have(
    tmp_path, persist, mode, window
):
    first, _ = talk(settings(tmp_path, mode), TOKENS, persist=persist)
    turn = [*TOKENS, *first.tokens, 1, 2, 3]
    second, counters = talk(settings(tmp_path, mode), turn, persist=persist)
    assert second.tokens == alone(turn, LONG)
    assert second.usage.window == window
    assert counters[f"window_{window}"] == 1
    whole = (len(TOKENS) + 39) // BLOCK * BLOCK
    assert second.cached == (0 if window == "miss" else whole)
    replays = window == "exact_replay"
    assert second.usage.replayed_tokens == (EXACT_REPLAY if replays else 0)
    assert counters["replayed_tokens"] == second.usage.replayed_tokens


def test_the_state_at_a_rebuilt_border_is_kept_for_the_next_one(tmp_path):
    talk(settings(tmp_path), TOKENS, persist="none")
    one, two, _ = talk(settings(tmp_path), TOKENS, TOKENS, persist="none")
    assert (one.usage.window, two.usage.window) == ("exact_replay", "local")
    assert one.tokens == two.tokens == alone(TOKENS, LONG)
    assert two.usage.replayed_tokens == 0


def test_a_replay_that_would_be_the_whole_hit_is_a_miss_and_says_so(tmp_path):
    short = TOKENS[: EXACT_REPLAY // BLOCK * BLOCK + 1]
    talk(settings(tmp_path), short, persist="none")
    again, counters = talk(settings(tmp_path), short, persist="none")
    assert (again.cached, again.usage.window) == (0, "miss")
    assert counters["window_miss"] == 1
    assert again.tokens == alone(short, LONG)


def test_what_loads_more_slowly_than_it_is_computed_is_no_lost_window(tmp_path):
    talk(settings(tmp_path), TOKENS, persist="none")
    again, counters = talk(settings(tmp_path, prefill_rate=1e12), TOKENS, persist="none")
    assert (again.cached, again.usage.window) == (0, None)
    assert "window_miss" not in counters
    assert again.tokens == alone(TOKENS, LONG)


def test_a_beginning_shared_with_others_is_rebuilt_once(tmp_path):
    talk(settings(tmp_path), TOKENS)
    others = [[*TOKENS[: 9 * BLOCK], *prompt(seed, 20)] for seed in (5, 6)]
    one, two, _ = talk(settings(tmp_path), *others)
    assert [a.cached for a in (one, two)] == [9 * BLOCK] * 2
    assert (one.usage.window, two.usage.window) == ("exact_replay", "local")
    assert [a.tokens for a in (one, two)] == [alone(tokens, LONG) for tokens in others]


def test_bounded_replay_is_marked_wherever_what_follows_it_goes(tmp_path):
    """Whoever demands exact windows does not get what was computed from approximate ones."""
    talk(settings(tmp_path), TOKENS, persist="none")
    turn = [*TOKENS, *prompt(9, 3 * BLOCK)]
    near, counters = talk(settings(tmp_path, "bounded"), turn, persist="last")
    assert (near.usage.window, near.usage.replayed_tokens) == ("bounded_replay", 12)
    assert counters["window_bounded_replay"] == 1
    again, _ = talk(settings(tmp_path, "bounded"), turn)
    assert (again.usage.window, again.cached) == ("stored", 15 * BLOCK)
    assert again.tokens == near.tokens
    exact, _ = talk(settings(tmp_path, "exact"), turn)
    assert (exact.usage.window, exact.cached) == ("exact_replay", 12 * BLOCK)
    assert exact.tokens == alone(turn, LONG)


def test_memory_for_windows_is_bounded_and_they_leave_it_with_time(tmp_path):
    state = toy().layout.state_bytes
    small = settings(tmp_path, window_bytes=3 * state)
    *answers, _ = talk(small, *(prompt(seed, 6 * BLOCK + 1) for seed in range(3)), persist="none")
    assert all(answer.tokens for answer in answers)
    old = settings(tmp_path, window_ttl_s=1e-9)
    one, two, _ = talk(old, TOKENS, TOKENS, persist="none")
    assert two.usage.window in ("exact_replay", "local")
    assert one.tokens == two.tokens


# -- several workers -------------------------------------------------------------------------------


@asynccontextmanager
async def workers(path, **options):
    """Two prefill workers and a decode worker whose windows live in memory alone."""
    config = EngineConfig(persist_state="none")
    where = settings(path, exchange=EXCHANGE)
    async with cluster(
        prefills=2,
        store=lambda runner: open_store(where, runner.layout),
        prefill_config=config,
        decode_config=config,
        **options,
    ) as it:
        await until(lambda: all(introduced(worker) for worker in it.workers))
        yield it


def introduced(worker) -> bool:
    directory = worker.service.connector._store._cache.windows._locations
    return len(directory._members) == 3


def counted(worker, name) -> float:
    return worker.service.load()[0].get(name, 0)


def of_prefill(it, name) -> float:
    return sum(counted(worker, name) for worker in it.prefills)


async def from_one_worker(it, index, name, tokens):
    """Ask so that this prefill worker alone can take it."""
    other = it.prefills[1 - index].service
    other.take_nothing_new(True)
    await until(
        lambda: [x.ready for x in it.engine._links.values() if x.role == "prefill"].count(True) == 1
    )
    answer = await ask(it.engine, request(name, tokens, LONG))
    other.take_nothing_new(False)
    await until(
        lambda: [x.ready for x in it.engine._links.values() if x.role == "prefill"].count(True) == 2
    )
    return answer


def test_a_worker_pulls_the_window_that_another_one_made(tmp_path):
    async def body():
        async with workers(tmp_path) as it:
            one = await from_one_worker(it, 0, "a", TOKENS)
            two = await from_one_worker(it, 1, "b", TOKENS)
            assert (one.usage.window, two.usage.window) == (None, "peer")
            assert two.cached == 12 * BLOCK
            assert one.tokens == two.tokens == alone(TOKENS, LONG)
            assert of_prefill(it, "window_peer") == 1
            # What was pulled is here now.
            three = await from_one_worker(it, 1, "c", TOKENS)
            assert three.usage.window == "local"

    run(body())


def test_the_window_of_an_answer_comes_from_the_decode_worker(tmp_path):
    async def body():
        async with workers(tmp_path) as it:
            for index in (0, 1):
                tokens = prompt(20 + index, 5 * BLOCK + 2)
                first = await from_one_worker(it, index, f"a{index}", tokens)
                turn = [*tokens, *first.tokens, 7, 8]
                second = await from_one_worker(it, 1 - index, f"b{index}", turn)
                assert second.usage.window == "peer"
                assert second.cached == (len(tokens) + 39) // BLOCK * BLOCK, "decoded blocks too"
                assert second.tokens == alone(turn, LONG)

    run(body())


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_lost_worker_costs_a_replay_and_no_token(tmp_path, how):
    async def body():
        async with workers(tmp_path) as it:
            tokens = prompt(3, 9 * BLOCK + 2)
            one = await from_one_worker(it, 0, "a", tokens)
            await getattr(it.prefills[0], how)()
            it.engine.set_workers(prefill=[it.prefills[1].address], decode=[it.decodes[0].address])
            two = await ask(it.engine, request("b", tokens, LONG))
            assert two.usage.window == "exact_replay"
            assert two.tokens == one.tokens == alone(tokens, LONG)
            it.prefills.pop(0)

    run(body())


def test_members_that_are_no_addresses_are_refused(tmp_path):
    store = open_store(settings(tmp_path, exchange=EXCHANGE), toy().layout)
    with pytest.raises(ConfigError, match="members"):
        store.set_members(["nowhere"])
    store.close()


# -- salt and class --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "shared", "objects", "memory"])
def test_salt_and_class_reach_every_tier(tmp_path, kind):
    where = {
        "local": settings(tmp_path / "kv"),
        "shared": settings(tmp_path / "kv", shared=True),
        "objects": settings(
            None, secret=bytes(32), tiers=(f"file://{tmp_path}/objects",), prefill_rate=1.0
        ),
        "memory": settings(None),
    }[kind]
    if kind == "objects":
        pytest.importorskip("obstore")
        (tmp_path / "objects").mkdir()
    asked = [
        {"tokens": TOKENS, "salt": "one", "traffic_class": "agent"},
        {"tokens": TOKENS, "salt": "two", "traffic_class": "chat"},
        {"tokens": TOKENS, "salt": "one", "traffic_class": "agent"},
    ]
    *answers, _ = talk(where, *[dict(one) for one in asked])
    assert [a.cached for a in answers] == [0, 0, 12 * BLOCK]
    assert len({tuple(a.tokens) for a in answers}) == 1
    if kind == "memory":
        return
    # Nothing of it is left in memory: what another process finds comes from the tier.
    later = [asked[0], {**asked[0], "salt": "three"}, asked[1]]
    *answers, _ = talk(where, *[dict(one) for one in later])
    assert [a.cached for a in answers] == [12 * BLOCK, 0, 12 * BLOCK]
    if kind != "objects":
        classes = {path.name.split("-")[1] for path in tmp_path.rglob("seg-*.kvs")}
        assert classes == {"agent", "chat"}


def test_a_shared_tier_without_a_secret_is_refused_by_name(tmp_path):
    for wrong in (
        replace(settings(None), tiers=(f"file://{tmp_path}",)),
        replace(settings(tmp_path), location=("redis://127.0.0.1:1/0",)),
    ):
        with pytest.raises(ConfigError, match="secret"):
            open_store(wrong, toy().layout)


def test_a_prompt_of_whole_blocks_hits_its_own_stored_window_when_asked_again(tmp_path):
    whole = TOKENS[: 12 * BLOCK]
    talk(settings(tmp_path), whole)
    again, _ = talk(settings(tmp_path), whole)
    assert (again.usage.window, again.cached) == ("stored", 11 * BLOCK)


def test_a_location_service_of_our_own_tells_a_later_process_where_blocks_lie(tmp_path):
    secret = bytes(range(32))
    (tmp_path / "key").write_bytes(secret)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    argv = ["serve-locations", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--key-file", str(tmp_path / "key")]
    shard = subprocess.Popen(
        [sys.executable, "-m", "deepinfer_kvtier", *argv], stdout=subprocess.DEVNULL
    )
    try:

        def listens():
            with socket.socket() as peer:
                return peer.connect_ex(("127.0.0.1", port)) == 0

        run(until(listens))
        where = settings(
            tmp_path / "kv", secret=secret, location=(f"tcp://127.0.0.1:{port}",), prefill_rate=1.0
        )
        talk(where, TOKENS)
        again, counters = talk(where, TOKENS)
        assert again.cached == 12 * BLOCK
        assert counters["prefix_hit_tokens_located"] == 12 * BLOCK
        assert again.tokens == alone(TOKENS, LONG)
    finally:
        shard.kill()
        shard.wait()
