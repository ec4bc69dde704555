"""Windows by Mooncake's transfer engine, the real one, over its TCP on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import deepinfer_kvtier as kvtier
from deepinfer_kvtier.remote.state_exchange import LocalLocations, WindowRecord
from deepinfer_kvtier.testing import ManualClock, payload_of

try:
    import mooncake.engine  # noqa: F401 - whether it loads is the question
except ImportError as missing:
    reason = f"the extra [mooncake] or libibverbs1 is missing: {missing}"
    pytest.skip(reason, allow_module_level=True)

STATE_BYTES = 9_001
TOKENS = np.arange(6 * 128 + 5)
HOLDER = textwrap.dedent(
    """
    import sys
    import numpy as np
    import deepinfer_kvtier as kvtier
    from deepinfer_kvtier.testing import payload_of
    from deepinfer_kvtier.remote.state_exchange import LocalLocations

    layout = kvtier.LayoutSpec(128, {
        "block": kvtier.parts(("index", 1000), ("main", 4000)),
        "state": kvtier.parts(("swa", 9001)),
    })
    cache = kvtier.open(
        host_bytes=4 << 20, secret=b"s" * 32, persist_state=False,
        windows={"key": b"k" * 32, "locations": LocalLocations(), "transport": sys.argv[1],
                 "mooncake_protocol": "tcp"},
    )
    ns = cache.namespace(layout, model="model", salt="tenant")
    hasher = ns.hasher()
    hasher.extend(np.arange(6 * 128 + 5))
    digest = hasher.digests[4]
    ns.put_state(digest, payload_of(digest + b"s", 9001), n_blocks=5)
    print("HOLDS", cache.windows.address, cache.windows.generation, flush=True)
    sys.stdin.readline()
    """
)


@pytest.fixture(params=["mooncake", "tcp"])
def holder(request):
    """(process, hint for the window after block 5 of TOKENS)"""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, request.param],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("HOLDS"):
            _, address, generation = line.split()
            break
    yield process, request.param, address, int(generation)
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def puller(make_model):
    directory = LocalLocations()
    clock = ManualClock()
    with kvtier.open(
        host_bytes=4 << 20,
        secret=b"s" * 32,
        persist_state=False,
        clock=clock,
        windows={
            "key": b"k" * 32,
            "locations": directory,
            "transport": "mooncake",
            "mooncake_protocol": "tcp",
            "deadline_ms": 5000,
        },
    ) as cache:
        model = make_model(cache)
        model.store(TOKENS)
        yield model, directory


def pull(model):
    window = np.zeros(STATE_BYTES, dtype=np.uint8)
    with model.ns.match(TOKENS) as match:
        if match.state is None:
            return None, window
        return model.ns.load(match, state_dst=window, wait=True).wait().state, window


def test_a_window_comes_by_the_engine_or_by_tcp_from_who_has_none(holder, puller):
    _, transport, address, generation = holder
    model, directory = puller
    digest = model.digests(TOKENS)[4]
    directory.publish(
        [WindowRecord(digest[:16], b"machine1", generation, 10**9, STATE_BYTES, 0, address)]
    )
    status, window = pull(model)
    assert status is kvtier.Status.OK
    assert np.array_equal(window, payload_of(digest + b"s", STATE_BYTES))
    stats = model.cache.windows.stats()
    assert stats.get("mooncake_pulled", 0) == (1 if transport == "mooncake" else 0)
    assert model.ns.match(TOKENS).state.tier == "host"


@pytest.mark.parametrize("holder", ["mooncake"], indirect=True)
def test_a_hung_holder_costs_its_deadline_and_is_left_alone(holder, puller):
    process, _, address, generation = holder
    model, directory = puller
    digest = model.digests(TOKENS)[4]
    directory.publish(
        [WindowRecord(digest[:16], b"machine1", generation, 10**9, STATE_BYTES, 0, address)]
    )
    exchange = model.cache.windows
    exchange._deadline_s = 0.02
    # Staged, then hung: the engine's read has no end of its own.
    client = exchange._client
    call = client.call

    def stage_then_stop(*arguments):
        body = call(*arguments)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        return body

    client.call = stage_then_stop
    exchange._deadline_s = 2.0
    assert pull(model)[0] is kvtier.Status.TIMEOUT
    client.call = call
    exchange._deadline_s = 0.02
    for _ in range(2):
        assert pull(model)[0] is kvtier.Status.TIMEOUT
    assert exchange.stats()["dead_peers"] == 1
    assert pull(model)[0] is None
