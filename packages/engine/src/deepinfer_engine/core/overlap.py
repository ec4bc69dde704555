"""The loop that plans a step while the one before it runs.

    step thread     plan 2, arrays | wait 1   | settle 1, tell | plan 3, arrays | wait 2 | ...
    device thread   run 1          | commit 1 | correct 2 | run 2               | commit 2 | ...

Never are two steps planned ahead of the one that runs. What a running step will commit is not known
to the plan behind it, only bounded: memory is reserved for the most it may commit, and between two
steps the device's thread corrects what was planned. It appends the tokens that were accepted, and
where a sequence ended or comes near its longest, leaves out its row or cuts its drafts; grammars
catch up. Everything else that outputs mean is worked out once the next step runs. Blocks and slots
of a sequence that ended stay its own until the step planned with it is over.

The tokens are those of the plain loop. What is hidden is planning, building arrays, counting,
telling streams and whatever their reader does; appending tokens is not. A device that waits for
nobody, or a process, gains that; operators driven from Python share their interpreter with the rest
and gain nothing.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deepinfer_engine.core.loop import EngineLoop
from deepinfer_engine.core.plan import Plan
from deepinfer_engine.core.runner import DecodeRow, PrefillChunk, StepOutput
from deepinfer_engine.core.sequence import LiveSequence
from deepinfer_engine.core.stop import draft_room

SWITCH_S = 2e-4


@dataclass(eq=False, slots=True)
class _Flight:
    """A step on its way."""

    plan: Plan
    chunks: list[PrefillChunk]
    rows: list[DecodeRow]
    walks: list[LiveSequence]
    """Those with a grammar, which walks on once the step before is over."""
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


def _end(flight: _Flight | None) -> None:
    if flight is not None:
        flight.over.set()


class OverlappedLoop(EngineLoop):
    """As `EngineLoop`; steps run on a thread of their own. `close` ends it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """See `EngineLoop`."""
        super().__init__(*args, **options)
        self._last: _Flight | None = None
        self._flights: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        # A thread that computes in Python keeps the interpreter for this long although the device
        # waits for it: five milliseconds by default.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._device = threading.Thread(target=self._fly, name="engine-device", daemon=True)
        self._device.start()

    def step(self, now: float) -> Plan | None:
        """Plan a step and launch it, then end the one before; returns one of them, or None when
        there is nothing to run. Raises what the runner raised."""
        plan = self._plan(now)
        flight = None
        if plan is not None:
            flight = _Flight(plan, *self._prepared(plan), self._walks(plan))
            self._flights.put(flight)
        before, self._last = self._last, flight
        if before is None:
            return plan
        before.over.wait()
        if before.error is not None:
            raise before.error
        self._settle(before.plan)
        return before.plan

    def close(self) -> None:
        """Wait for what runs; nothing runs afterwards."""
        self._flights.put(None)
        self._device.join()

    @property
    def waits_for(self) -> Sequence[threading.Thread]:
        """The device's."""
        return (self._device,)

    # -- the device's thread --------------------------------------------------------------------

    def _fly(self) -> None:
        before: _Flight | None = None
        while (flight := self._next(before)) is not None:
            if self._broken is None:
                try:
                    self._commit(flight.plan, self._corrected(flight, before))
                except BaseException as error:
                    self._broken = error
            _end(before)
            flight.error = self._broken
            before = flight
        _end(before)

    def _next(self, before: _Flight | None) -> _Flight | None:
        """The next flight. Where it is there already, nobody hears of the end of the one before
        until it is launched: who was woken would take the interpreter while the device waits."""
        try:
            return self._flights.get_nowait()
        except queue.Empty:
            _end(before)
            return self._flights.get()

    def _corrected(self, flight: _Flight, before: _Flight | None) -> Sequence[StepOutput | None]:
        """Run a flight as what the one before it committed has it."""
        plan = flight.plan
        if plan.roomy and plan.ends == self.scheduler.at.ends:
            _end(before)
            return self._launch(flight.chunks, flight.rows, flight.walks)
        rows: list[DecodeRow] = []
        at: list[int] = []
        nextn = self._runner.caps.nextn
        for i, ((seq, drafts), row) in enumerate(zip(plan.rows, flight.rows, strict=True)):
            if seq.finish_reason is not None or seq.aborting:
                continue
            room = min(drafts, draft_room(nextn, len(seq.tokens), seq.most_tokens))
            at.append(i)
            rows.append(row if room == row.max_draft else replace(row, max_draft=room))
        _end(before)
        walks = [seq for seq in flight.walks if seq.finish_reason is None and not seq.aborting]
        outputs = self._launch(flight.chunks, rows, walks)
        if len(at) == len(flight.rows):
            return outputs
        n = len(flight.chunks)
        whole: list[StepOutput | None] = [*outputs[:n], *([None] * len(flight.rows))]
        for i, output in zip(at, outputs[n:], strict=True):
            whole[n + i] = output
        return whole
