"""Every order in which the messages and accidents of two transfers can reach a decode worker.

The worker's side is the package's own (`pd/landing.py`, `core/pools.py`); the messages are the ones
that `pd/sending.py` makes. A path is a list of events; a world is what they lead to. Messages are
delivered in any order, late ones too; accidents are rationed, or there would be no end of paths.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from toy_engine import BLOCK, greedy, hand_loop, prompt, request, toy

from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.windows import NOTHING, Prefix
from deepinfer_engine.errors import TransferError
from deepinfer_engine.pd import landing
from deepinfer_engine.pd.sending import Outgoing
from deepinfer_engine.pd.wire import Xid, add_to_combined

TOKENS = prompt(1, 2 * BLOCK + 3)
MESSAGES = ("unit0", "unit1", "unit2", "commit")
ATTEMPTS = 2
ENDS = ("abort", "revoke", "crash", "timeout", "restart")
"""The router gives up; the writer's grant ends; the prefill worker dies; nothing was committed for
long; the decode worker restarts."""
BREAKS: dict[str, str] = {
    "again": "unit0",  # once more, after it came
    "state again": "unit2",
    "confused": "unit1",  # from the other request's writer
    "outside": "unit1",  # for blocks that were not reserved
    "mislabelled": "unit1",  # for other tokens than its blocks hold
    "of no kind": "unit1",
    "usurped": "commit",  # from the other request's writer
    "short": "commit",  # of fewer tokens than were reserved
    "all cached": "commit",
    "second": "commit",  # after the first one, and another one
}
"""Messages that no writer can have meant: they end the attempt."""
IGNORED = {"misnumbered": "unit1"}
"""A message that belongs to nothing here: it changes nothing."""
LIES = {"few": "commit", "wrong sum": "commit"}
"""A commit that does not fit what was sent: the attempt is never ready."""
MISDEEDS = {**BREAKS, **IGNORED, **LIES, "damaged": "unit1"}
HASTE = ("hasty run", "hasty abort", "reserved again")
"""What decode itself must not do."""
ACCIDENTS = (*ENDS, *MISDEEDS, *HASTE)

Event = tuple[str, int]
Path = tuple[Event, ...]


class Found(AssertionError):  # noqa: N818 - it reads as what it is
    """What must never be, and the events that led there."""


def made(i: int, attempt: int) -> Outgoing:
    """All units of one attempt, filled with bytes that are its alone."""
    source = toy(num_blocks=10, num_state_slots=4)
    for block in (1, 2, 3):
        value = 80 * i + 20 * attempt + block
        source.block_bytes(block)[:] = bytes([value]) * source.layout.block_bytes
    source.state_bytes(1)[:] = bytes([80 * i + 20 * attempt + 9]) * source.layout.state_bytes
    out = Outgoing(source, 0, attempt, len(TOKENS))
    list(out.blocks([1, 2, 3], 2))
    list(out.blocks([1, 2, 3], 3))
    list(out.state(1))
    return out


CHANGES: dict[str, dict[str, int]] = {
    "outside": {"block_first": 3, "token_first": 3 * BLOCK, "token_count": 3 - BLOCK},
    "mislabelled": {"token_first": 0},
    "of no kind": {"group": 7},
}
"""Of headers."""
OUT = {(i, a): made(i, a) for i in range(2) for a in range(1, ATTEMPTS + 1)}
DATA = {key: [b"".join(unit.views) for unit in outgoing.units] for key, outgoing in OUT.items()}
VALUES = {key: {80 * key[0] + 20 * key[1] + n for n in (1, 2, 3, 9)} for key in OUT}


class Memory:
    """As much of a runner as a landing needs. It outlives the worker's restart."""

    def __init__(self) -> None:
        model = toy(num_blocks=10, num_state_slots=4)
        self.caps, self.layout = model.caps, model.layout
        self.blocks = [bytearray(self.layout.block_bytes) for _ in range(10)]
        self.states = [bytearray(self.layout.state_bytes) for _ in range(4)]

    def block_bytes(self, block: int) -> memoryview:
        return memoryview(self.blocks[block])

    def state_bytes(self, slot: int) -> memoryview:
        return memoryview(self.states[slot])

    def bytes(self) -> bytes:
        return b"".join((*self.blocks, *self.states))


@dataclass
class Try:
    """One attempt at one request, as its prefill worker and the world see it."""

    number: int
    attempt: Any
    run: int
    """Of the decode worker, counted by its restarts."""
    writer: object = field(default_factory=object)
    waiting: list[str] = field(default_factory=lambda: list(MESSAGES))
    """On their way."""
    given_up: bool = False
    accidents: set[str] = field(default_factory=set)
    too_late: set[str] = field(default_factory=set)
    """Accidents that came when all was there already."""


class World:
    def __init__(self, module: Any = landing, *, requests: int = 2, accidents: int = 2) -> None:
        self.module, self.memory, self.run = module, Memory(), 0
        self.left = accidents
        self.stale: list[tuple[int, Try, str]] = []
        """Of attempts that are over, and still on their way."""
        self.loop: Any = None
        self.landings: Any = None
        self.tries: list[Try] = []
        self._start()
        self.tries = [self._reserved(i, 1) for i in range(requests)]

    def _start(self) -> None:
        self.loop, _ = hand_loop(self.memory, "decode", decode_reserve_tokens=0)  # type: ignore[arg-type]
        self.landings = self.module.Landings(
            self.loop, self.memory, first_grant=100 + 1000 * self.run
        )

    def _reserved(self, i: int, number: int) -> Try:
        attempt = self.landings.reserve(Xid(f"r{i}", number), len(TOKENS))
        return Try(number, attempt, self.run)

    # -- what may happen -------------------------------------------------------------------------

    def possible(self) -> Iterator[Event]:
        for i, one in enumerate(self.tries):
            stage = self.stage(one)
            for message in one.waiting:
                if i == 0 or message == one.waiting[0]:  # of the second in order, or it has no end
                    yield message, i
            if stage == "READY":
                yield "run", i
            if stage == "RUNNING":
                yield "finish", i
            if stage == "ABORTING" and one.attempt.writer_owns:
                yield "acknowledged", i
            if stage in ("RESERVED", "WRITING", "COMMITTED") and not one.attempt.writer_owns:
                yield "noticed", i
            if stage == "OVER" and one.number < ATTEMPTS and one.given_up:
                yield "retry", i
            if i == 0 and self.stale:
                yield f"late {self.stale[0][2]}", i
            if self.left:
                yield from ((kind, i) for kind in ACCIDENTS if self._may(kind, i, one, stage))

    def _may(self, kind: str, i: int, one: Try, stage: str) -> bool:
        if kind in one.accidents:
            return False
        if kind == "restart":
            return i == 0
        if kind in ("abort", "timeout"):
            return (
                not one.given_up
                and stage not in ("OVER", "READY")
                and not (kind == "timeout" and stage == "RUNNING")
            )
        if kind == "crash":
            return bool(one.waiting)
        if kind == "revoke":
            return one.run == self.run and stage not in ("OVER", "RUNNING")
        if kind == "hasty abort":
            return stage == "RUNNING"
        if kind in HASTE:
            return stage not in ("OVER", "READY", "RUNNING")
        if kind in ("again", "state again", "second"):
            return MISDEEDS[kind] not in one.waiting
        if kind in ("confused", "usurped") and one.attempt.writer is not one.writer:
            return False  # the first that writes is the writer
        return stage != "OVER" and MISDEEDS[kind] in one.waiting

    def stage(self, one: Try) -> str:
        if one.run != self.run or one.attempt.stage.name in ("GONE", "DONE"):
            return "OVER"
        return str(one.attempt.stage.name)

    def happen(self, event: Event) -> None:
        kind, i = event
        one = self.tries[i]
        if kind in ACCIDENTS:
            one.accidents.add(kind)
            self.left -= 1
            if self.stage(one) in ("READY", "RUNNING"):
                one.too_late.add(kind)
        if kind in MESSAGES:
            one.waiting.remove(kind)
            self._deliver(i, one, kind)
        elif kind in MISDEEDS:
            self._misbehave(kind, i, one)
        elif kind in HASTE:
            self._hurry(kind, i, one)
        elif kind.startswith("late"):
            self._late()
        elif kind == "run":
            self._run(i, one)
        elif kind == "finish":
            self._finish(one)
        elif kind == "acknowledged":
            self.landings.revoke(one.attempt)
        elif kind == "noticed":
            one.given_up = True
            self.landings.abort(one.attempt)
        elif kind == "retry":
            self.stale += [(i, one, message) for message in one.waiting[:2]]
            self.tries[i] = self._reserved(i, one.number + 1)
        elif kind == "restart":
            self.run += 1
            self._start()
            for other in self.tries:
                other.given_up = True  # the router sees the connection end
        else:
            self._give_up(kind, one)

    def _give_up(self, kind: str, one: Try) -> None:
        if kind == "crash":
            one.waiting.clear()
            if one.attempt.writer is not one.writer:
                kind = "abort"  # decode does not know yet who was to write this: the router says so
        stage = self.stage(one)
        if stage == "OVER":
            return
        if stage == "RUNNING":
            if kind == "abort":
                one.given_up = True
                self._finish(one)
            return
        if kind != "revoke":
            one.given_up = True
            self.landings.abort(one.attempt)
        if kind != "abort":
            self.landings.revoke(one.attempt)

    def _run(self, i: int, one: Try) -> None:
        seq = LiveSequence(request(f"r{i}", TOKENS, greedy(3)), one.attempt.xid.key, 0.0)
        seq.tokens.append(5)
        self.landings.run(one.attempt, seq)

    def _finish(self, one: Try) -> None:
        self.loop.abort(one.attempt.xid.key)
        self.landings.done(one.attempt)

    def _live(self, one: Try) -> bool:
        """Whether its messages are to be taken."""
        stages = ("RESERVED", "WRITING", "COMMITTED")
        return self.stage(one) in stages and one.attempt.writer_owns

    def _late(self) -> None:
        i, one, message = self.stale.pop(0)
        before = self.memory.bytes()
        if self._send(i, one, message) or self.memory.bytes() != before:
            raise Found(f"{message} of an attempt that was over was taken")

    def _misbehave(self, kind: str, i: int, one: Try) -> None:
        what = MISDEEDS[kind]
        live, before = self._live(one), self.memory.bytes()
        if kind == "second":
            live = live and one.attempt.commit is not None
        if kind in LIES:
            one.waiting.remove("commit")
            one.given_up = True
        raised = self._send(i, one, what, kind)
        # Of a damaged unit its own memory may hold something, as long as it does not count.
        asked_again = kind == "damaged" and live
        if kind not in LIES and not asked_again and self.memory.bytes() != before:
            raise Found(f"{kind}: it was written")
        if kind in BREAKS and live and not raised:
            raise Found(f"{kind}: it was taken")
        if kind not in BREAKS and kind not in LIES and raised:
            raise Found(f"{kind}: it ended the attempt")
        if (
            kind == "damaged"
            and live
            and 1 not in one.attempt.corrupt_units
            and (not one.attempt.blocks_written & {2})
        ):
            raise Found("a damaged unit is not asked for again")

    def _hurry(self, kind: str, i: int, one: Try) -> None:
        try:
            if kind == "reserved again":
                self.landings.reserve(one.attempt.xid, len(TOKENS))
            elif kind == "hasty run":
                self._run(i, one)
            else:
                self.landings.abort(one.attempt)
        except (RuntimeError, TransferError):
            return
        raise Found(f"{kind} was let pass")

    def _deliver(self, i: int, one: Try, what: str) -> None:
        live, before = self._live(one), self.memory.bytes()
        self._send(i, one, what)
        if not live and self.memory.bytes() != before:
            raise Found(f"{what} was written into an attempt that takes nothing any more")

    def _send(self, i: int, one: Try, what: str, how: str = "") -> bool:
        """Hand a message over; whether it broke the attempt, which the service then ends."""
        out = OUT[i, one.number]
        writer = object() if how in ("confused", "usurped") else one.writer
        try:
            if what == "commit":
                self.landings.commit(writer, Xid(f"r{i}", one.number), self._commit(out, how))
            else:
                number = int(what[4])
                payload = bytearray(DATA[i, one.number][number])
                if how == "damaged":
                    payload[0] ^= 0xFF
                header = dataclasses.replace(
                    out.units[number].header, grant_id=one.attempt.grant_id, **CHANGES.get(how, {})
                )
                if how == "misnumbered":
                    header = dataclasses.replace(header, attempt=header.attempt + 7)
                self.landings.unit(writer, header, memoryview(payload))
        except TransferError:
            one.given_up = True
            if self.stage(one) not in ("OVER", "RUNNING"):
                self.landings.abort(one.attempt)
                self.landings.revoke(one.attempt)
            return True
        return False

    def _commit(self, out: Outgoing, how: str) -> Any:
        units, digest = len(out.units), out.digest
        if how == "few":
            units, digest = 2, 0
            for unit in out.units[:2]:
                digest = add_to_combined(digest, unit.header.unit, unit.header.digest)
        if how == "wrong sum":
            digest ^= 1
        tokens = TOKENS[:-1] if how == "short" else TOKENS
        prefix = Prefix(len(TOKENS), len(TOKENS)) if how == "all cached" else NOTHING
        return self.module.Commit(units, digest, tokens, 6 if how == "second" else 5, (), prefix)

    # -- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        self.loop.audit()
        held = 0
        owners: dict[int, int] = {}
        for i, one in enumerate(self.tries):
            stage = self.stage(one)
            if stage == "OVER":
                continue
            attempt = one.attempt
            held += len(attempt.reservation.blocks)
            for block in attempt.reservation.blocks:
                if owners.setdefault(block, i) != i:
                    raise Found(f"block {block} belongs to both requests")
            bytes_here = set[int]()
            for block in attempt.reservation.blocks:
                bytes_here |= set(self.memory.blocks[block])
            bytes_here |= set(self.memory.states[attempt.reservation.state_slot])
            if stage in ("READY", "RUNNING") and bytes_here != VALUES[i, one.number]:
                raise Found(f"r{i} is {stage} and holds bytes {sorted(bytes_here)}")
            if stage in ("READY", "RUNNING") and one.waiting:
                raise Found(f"r{i} is {stage} without all its units and its commit")
            if stage in ("COMMITTED", "READY") and one.given_up and not one.accidents & {*LIES}:
                raise Found(f"r{i} is {stage} and was given up")
            if stage in ("READY", "RUNNING") and (one.accidents & {*LIES, "revoke"}) - one.too_late:
                raise Found(f"r{i} is {stage} although {sorted(one.accidents)}")
        owned = self.loop.scheduler.pools.blocks.owned
        if owned != held:
            raise Found(f"{owned} blocks are taken, and attempts have {held}")
        if self.landings.writer_held_blocks > held:
            raise Found("a writer holds blocks of nobody")

    def key(self) -> str:
        """Equal for worlds that can only go on alike."""
        rows = [
            (
                one.number,
                one.run,
                one.attempt.stage.name,
                one.attempt.writer is one.writer,
                one.attempt.writer is None,
                one.attempt.writer_owns,
                one.attempt.request_owns,
                one.attempt.units_seen,
                sorted(one.attempt.blocks_written),
                sorted(one.attempt.state_ranges),
                sorted(one.attempt.corrupt_units),
                one.attempt.commit is not None,
                one.waiting,
                one.given_up,
                sorted(one.accidents),
                sorted(one.too_late),
            )
            for one in self.tries
        ]
        stale = [(i, one.number, message) for i, one, message in self.stale]
        return repr((rows, stale, self.left, self.run))


def replay(path: Path, module: Any, requests: int, accidents: int) -> World:
    world = World(module, requests=requests, accidents=accidents)
    for event in path:
        try:
            world.happen(event)
            world.check()
        except Found:
            raise
        except Exception as error:
            raise Found(f"{type(error).__name__}: {error}") from error
    return world


def explore(
    module: Any = landing, *, requests: int = 2, accidents: int = 2, most: int | None = None
) -> tuple[int, int]:
    """Breadth first over all worlds; (how many there are, how many are ends). Raises Found."""
    seen, queue, ends = set[str](), deque[Path]([()]), 0
    while queue and (most is None or len(seen) < most):
        path = queue.popleft()
        try:
            world = replay(path, module, requests, accidents)
        except Found as found:
            raise Found(f"{found}, after {' '.join(f'{k}{i}' for k, i in path)}") from found
        key = world.key()
        if key in seen:
            continue
        seen.add(key)
        steps = list(world.possible())
        queue.extend((*path, step) for step in steps)
        if not steps:
            ends += 1
            stages = {world.stage(one) for one in world.tries}
            if stages != {"OVER"} or world.loop.scheduler.pools.blocks.owned:
                raise Found(f"it ends as {stages}, after {path}")
    return len(seen), ends
