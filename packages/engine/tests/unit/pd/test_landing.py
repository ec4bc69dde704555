"""Coverage, digests and owners of a landing. Every order of events: `test_explorer.py`."""

from __future__ import annotations

import dataclasses

import pytest
from toy_engine import BLOCK, hand_loop, prompt, toy

from deepinfer_engine.core.windows import NOTHING, Prefix
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd.landing import Commit, Landings, Stage
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.wire import Xid, add_to_combined, unit_digest

TOKENS = prompt(1, 2 * BLOCK + 3)
FIRST_GRANT = 100


def sent_by(request):
    """Units of request number `request`, every block and the state filled with its own bytes."""
    source = toy(num_blocks=10, num_state_slots=4)
    for block in (1, 2, 3):
        source.block_bytes(block)[:] = bytes([10 * request + block]) * source.layout.block_bytes
    source.state_bytes(1)[:] = bytes([10 * request + 9]) * source.layout.state_bytes
    out = Outgoing(source, FIRST_GRANT + request, 1, len(TOKENS))
    list(out.blocks([1, 2, 3], 2))
    list(out.blocks([1, 2, 3], 3))
    list(out.state(1))
    return out


class Memory:
    """As much of a runner as a landing needs."""

    def __init__(self):
        model = toy(num_blocks=10, num_state_slots=4)
        self.caps, self.layout = model.caps, model.layout
        self.clear()

    def clear(self):
        self._blocks = [bytearray(self.layout.block_bytes) for _ in range(10)]
        self._states = [bytearray(self.layout.state_bytes) for _ in range(4)]

    def block_bytes(self, block):
        return memoryview(self._blocks[block])

    def state_bytes(self, slot):
        return memoryview(self._states[slot])


class World:
    """A decode side without sockets, and the units and commits prefill would send it."""

    def __init__(self, n_requests=1, *, memory=None, units=None):
        self.runner = memory or Memory()
        self.loop, self.sink = hand_loop(self.runner, "decode", decode_reserve_tokens=0)
        self.landings = Landings(self.loop, self.runner, first_grant=FIRST_GRANT)
        self.writer = object()
        self.attempts = [
            self.landings.reserve(Xid(f"r{i}", 1), len(TOKENS)) for i in range(n_requests)
        ]
        self.units = units or [sent_by(i) for i in range(n_requests)]

    def send(self, unit, i=0, *, header=None, payload=None, writer=None):
        made = self.units[i].units[unit]
        data = b"".join(made.views) if payload is None else payload
        return self.landings.unit(writer or self.writer, header or made.header, memoryview(data))

    def commit_body(self, i=0, **changes):
        out = self.units[i]
        commit = Commit(len(out.units), out.digest, TOKENS, 5, (), NOTHING)
        return dataclasses.replace(commit, **changes)

    def commit(self, i=0, *, writer=None, **changes):
        attempt = self.attempts[i]
        return self.landings.commit(
            writer or self.writer, attempt.xid, self.commit_body(i, **changes)
        )

    def held(self):
        self.loop.audit()
        return self.loop.scheduler.pools.blocks.owned

    def bytes_of(self, i):
        attempt = self.attempts[i].reservation
        return {value for b in attempt.blocks for value in bytes(self.runner.block_bytes(b))} | set(
            bytes(self.runner.state_bytes(attempt.state_slot))
        )


def test_all_units_and_the_commit_make_an_attempt_ready():
    world = World()
    for unit in range(3):
        assert world.send(unit).stage is Stage.WRITING
    assert world.commit().stage is Stage.READY
    assert world.bytes_of(0) == {1, 2, 3, 9}


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_units_may_arrive_in_any_order_even_after_the_commit(order):
    world = World()
    first, *rest = order
    world.send(first)
    assert world.commit().stage is Stage.COMMITTED
    for unit in rest:
        attempt = world.send(unit)
    assert attempt.stage is Stage.READY
    assert world.bytes_of(0) == {1, 2, 3, 9}


def test_a_commit_without_all_its_units_is_never_ready():
    world = World()
    world.send(0)
    world.send(2)
    assert world.commit().stage is Stage.COMMITTED


def test_units_without_a_commit_are_never_ready():
    world = World()
    for unit in range(3):
        assert world.send(unit).stage is Stage.WRITING


def test_a_unit_that_arrives_twice_breaks_the_attempt():
    world = World()
    world.send(0)
    with pytest.raises(TransferError, match="second time"):
        world.send(0)
    with pytest.raises(TransferError, match="second time"):
        world.send(2) and world.send(2)


def test_a_damaged_unit_is_not_written_and_asked_for_once_more():
    world = World()
    data = bytearray(b"".join(world.units[0].units[0].views))
    data[17] ^= 1
    attempt = world.send(0, payload=bytes(data))
    assert attempt.corrupt_units == {0}
    assert attempt.units_seen == 0
    assert world.send(0).corrupt_units == set()
    with pytest.raises(TransferError, match="damaged twice"):
        world.send(1, payload=bytes(len(world.runner.block_bytes(1)))) and world.send(
            1, payload=bytes(len(world.runner.block_bytes(1)))
        )
    assert world.landings.counters["transfer_digest_errors"] == 3


@pytest.mark.parametrize(
    ("unit", "changes"),
    [
        (0, {"block_first": 2}),
        (0, {"block_count": 3}),
        (0, {"block_count": 0}),
        (1, {"block_first": 3}),
        (1, {"token_count": BLOCK}),
        (1, {"token_first": 0}),
        (2, {"block_first": 1}),
        (2, {"token_count": 5}),
        (0, {"group": 7}),
    ],
)
def test_a_unit_that_does_not_fit_its_reservation_breaks_the_attempt(unit, changes):
    world = World()
    header = dataclasses.replace(world.units[0].units[unit].header, **changes)
    with pytest.raises(TransferError):
        world.send(unit, header=header)


def test_a_unit_of_another_attempt_or_grant_is_not_written():
    world = World()
    header = world.units[0].units[0].header
    assert world.send(0, header=dataclasses.replace(header, attempt=2)) is None
    assert world.send(0, header=dataclasses.replace(header, grant_id=99)) is None
    assert world.bytes_of(0) == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"n_units": 2},
        {"digest": 1},
        {"tokens": TOKENS[:-1]},
        {"prefix": Prefix(len(TOKENS), len(TOKENS))},
    ],
)
def test_a_commit_that_disagrees_with_what_arrived_breaks_the_attempt(changes):
    world = World()
    for unit in range(3):
        world.send(unit)
    with pytest.raises(TransferError):
        world.commit(**changes)


def test_a_commit_that_claims_less_than_the_whole_prompt_is_never_ready():
    world = World()
    digest = add_to_combined(0, 0, world.units[0].units[0].header.digest)
    world.send(0)
    with pytest.raises(TransferError):
        world.commit(n_units=1, digest=digest)


def test_the_same_commit_again_changes_nothing_and_another_breaks_the_attempt():
    world = World()
    world.commit()
    assert world.commit().stage is Stage.COMMITTED
    with pytest.raises(TransferError, match="twice"):
        world.commit(first_token=6)


def test_a_second_writer_is_refused():
    world = World()
    world.send(0)
    with pytest.raises(TransferError, match="two peers"):
        world.send(1, writer=object())
    with pytest.raises(TransferError, match="does not write"):
        world.commit(writer=object())


@pytest.mark.parametrize("first", ["abort", "revoke"])
def test_memory_is_free_only_when_request_and_writer_are_both_gone(first):
    world = World()
    world.send(0)
    (attempt,) = world.attempts
    steps = {"abort": world.landings.abort, "revoke": world.landings.revoke}
    steps.pop(first)(attempt)
    assert world.held() == 3
    assert world.send(1) is None, "nothing is written for an attempt that ends"
    steps.popitem()[1](attempt)
    assert world.held() == 0
    assert attempt.stage is Stage.GONE


def test_large_state_travels_in_parts_that_cover_it_exactly(monkeypatch):
    monkeypatch.setattr("deepinfer_engine.pd.sending.UNIT_BYTES", 150)
    world = World()
    out = world.units[0]
    assert [u.header.group for u in out.units] == [0, 0, 0, 1, 1]
    assert unit_digest(out.units[-1].views) == out.units[-1].header.digest
    for unit in reversed(range(5)):
        world.send(unit)
    assert world.commit().stage is Stage.READY
    assert world.bytes_of(0) == {1, 2, 3, 9}


def loading(world, blocks=2, i=0, **changes):
    """Begin the load of the first blocks, and fill them as the store would."""
    tokens = changes.get("tokens", TOKENS[: blocks * BLOCK])
    begun = world.landings.load_begins(
        changes.get("writer", world.writer), world.attempts[i].xid, tokens
    )
    if begun is not None:
        for number, view in enumerate(begun[1], 1):
            view[:] = bytes([10 * i + number]) * len(view)
    return begun


def without_blocks(upto):
    """A request's units but those of its first blocks."""
    out = sent_by(0)
    source, table = out.runner, [1, 2, 3]
    rest = Outgoing(source, FIRST_GRANT, 1, len(TOKENS))
    rest.blocks_made = upto
    list(rest.blocks(table, 3))
    list(rest.state(1))
    return rest


def test_loaded_blocks_and_the_units_of_the_others_make_an_attempt_ready():
    world = World(units=[without_blocks(2)])
    attempt, views = loading(world)
    assert len(views) == 2
    world.send(0)
    assert world.landings.load_ended(attempt, 2)
    world.send(1)
    assert world.commit().stage is Stage.READY
    assert world.bytes_of(0) == {1, 2, 3, 9}


def test_blocks_that_a_load_did_not_bring_are_sent():
    world = World(units=[without_blocks(1)])
    attempt, _ = loading(world)
    assert world.landings.load_ended(attempt, 1)
    for unit in range(2):
        world.send(unit)
    assert world.commit().stage is Stage.READY
    assert world.landings.counters["transfer_stored_bytes"] == world.runner.layout.block_bytes


def test_blocks_that_neither_a_load_nor_a_unit_brought_are_missed():
    world = World(units=[without_blocks(2)])
    attempt, _ = loading(world)
    world.landings.load_ended(attempt, 1)
    for unit in range(2):
        world.send(unit)
    with pytest.raises(TransferError, match="not what prefill committed"):
        world.commit()


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": TOKENS},
        {"tokens": TOKENS[: BLOCK + 1]},
        {"tokens": ()},
        {"writer": object()},
        "again",
        "behind a unit",
    ],
    ids=["whole prompt", "half a block", "nothing", "of another", "again", "behind a unit"],
)
def test_a_load_that_its_writer_could_not_have_meant_breaks_the_attempt(changes):
    world = World(units=[without_blocks(1)])
    if changes == "again":
        world.landings.load_ended(loading(world, 1)[0], 1)
        changes = {}
    else:
        world.send(0)
        changes = {} if changes == "behind a unit" else changes
    with pytest.raises(TransferError):
        loading(world, **changes)


def test_while_a_load_writes_nobody_else_does_and_nothing_is_committed():
    world = World()
    attempt, _ = loading(world, 1)
    with pytest.raises(TransferError, match="that are loaded"):
        world.send(0)
    with pytest.raises(TransferError, match="loaded"):
        world.commit()
    world.landings.load_ended(attempt, 0)
    for unit in range(3):
        world.send(unit)
    with pytest.raises(TransferError, match="loaded"):
        world.commit(tokens=(TOKENS[0] + 1, *TOKENS[1:]))
    assert world.commit().stage is Stage.READY


def test_memory_of_an_attempt_that_ended_is_not_free_while_a_load_writes_it():
    world = World()
    attempt, views = loading(world)
    world.landings.abort(attempt)
    world.landings.revoke(attempt)
    assert attempt.stage is Stage.GONE
    assert world.held() == world.landings.writer_held_blocks == len(views) == 2
    assert loading(world) is None
    assert not world.landings.load_ended(attempt, 2), "nobody waits for it"
    assert world.held() == world.landings.writer_held_blocks == 0


def test_a_payload_that_changes_while_it_is_copied_does_not_count():
    """As in memory that a peer writes: what lies in the blocks is judged, not what came."""
    world = World()
    made = world.units[0].units[0]
    payload = bytearray(b"".join(made.views))
    places = world.runner.block_bytes

    def late(block):
        payload[0] = 99
        return places(block)

    world.runner.block_bytes = late
    attempt = world.landings.unit(world.writer, made.header, memoryview(payload))
    assert attempt.corrupt_units == {0}
    world.runner.block_bytes = places
    for unit in range(3):
        attempt = world.send(unit)
    assert world.commit().stage is Stage.READY
    assert world.bytes_of(0) == {1, 2, 3, 9}
